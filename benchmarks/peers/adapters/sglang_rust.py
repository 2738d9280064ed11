"""SGLang's UnifiedRadixCache over its compiled tree core."""

from benchmarks.peers.adapters.sglang_unified import Unified

__all__ = ["Adapter"]


class Adapter(Unified):
    """The core is Rust, inside the wheel."""

    title = "SGLang unified, Rust core"
    core = "rust"
