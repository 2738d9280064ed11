"""What a model costs: FLOPs of a prefill, bytes of KV and states, times of copies."""
