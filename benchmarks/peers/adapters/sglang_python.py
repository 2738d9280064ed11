"""SGLang's UnifiedRadixCache over its Python tree core."""

from benchmarks.peers.adapters.sglang_unified import Unified

__all__ = ["Adapter"]


class Adapter(Unified):
    """The core is Python."""

    title = "SGLang unified, Python core"
    core = "python"
