"""The tree actor and the pure structure that it alone may touch."""

from phloem.actors.tree.core import WritePolicy
from phloem.actors.tree.keys import ContentMark, Namespace, TokenKey, Tokens
from phloem.actors.tree.leases import Lease
from phloem.actors.tree.placement import Placement, Wanted
from phloem.actors.tree.results import Ended, Kept
from phloem.actors.tree.tree import Evicted, InsertResult, Match, PagesChanged, Tree, TreeFigures

__all__ = [
    "ContentMark",
    "Ended",
    "Evicted",
    "InsertResult",
    "Kept",
    "Lease",
    "Match",
    "Namespace",
    "PagesChanged",
    "Placement",
    "TokenKey",
    "Tokens",
    "Tree",
    "TreeFigures",
    "Wanted",
    "WritePolicy",
]
