"""phloem: an asyncio actor runtime that caches prompt prefixes of hybrid language models."""

from phloem.actors.allocator import Grant
from phloem.actors.tree import (
    ContentMark,
    Evicted,
    InsertResult,
    Match,
    Namespace,
    PagesChanged,
    Placement,
    TokenKey,
    Tree,
    Wanted,
)
from phloem.cuda_streams.pools import DevicePools
from phloem.cuda_streams.specs import KVSpec, LayerSpec, StateSpec
from phloem.cuda_streams.workers import WorkerStream
from phloem.errors import (
    CacheCrashed,
    CacheReset,
    CopyCancelled,
    CopyFailed,
    EngineDead,
    HostMemoryShort,
    InvalidRequest,
    NoRoom,
    OwnershipError,
    PhloemError,
    PoolFigures,
    RuntimeClosed,
    StaleHandle,
    TransferFailed,
)
from phloem.runtime.cache import CacheRuntime, PoolStats, Stats
from phloem.runtime.config import CacheConfig
from phloem.runtime.layout import ModelLayout
from phloem.runtime.lease import Lease
from phloem.runtime.nowait import Admission, Admitted
from phloem.runtime.request import Request
from phloem.runtime.step import Step

__all__ = [
    # the runtime
    "CacheRuntime", "CacheConfig", "Request", "Step", "Lease", "Grant", "Stats", "PoolStats",
    "Admission", "Admitted",
    # what a model keeps
    "ModelLayout", "LayerSpec", "KVSpec", "StateSpec", "DevicePools", "WorkerStream",
    # keys and answers
    "TokenKey", "Namespace", "ContentMark", "Match", "InsertResult", "PagesChanged", "Evicted",
    "Placement", "Wanted", "Tree",
    # errors
    "PhloemError", "InvalidRequest", "NoRoom", "PoolFigures", "StaleHandle", "OwnershipError",
    "TransferFailed", "CopyFailed", "CopyCancelled", "EngineDead", "HostMemoryShort",
    "CacheReset", "RuntimeClosed", "CacheCrashed",
]  # fmt: skip
