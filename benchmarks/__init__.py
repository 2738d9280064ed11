"""What phloem costs: `python -m benchmarks`, and beside its peers: `python -m benchmarks.peers`."""
