"""The figures of the pools that a refusal carries: who has the places that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.actors.ledger import Ledger
from phloem.actors.tree.results import TreeFigures
from phloem.errors import PoolFigures

__all__ = ["pool_figures"]


def pool_figures(
    asked: Sequence[int], ledger: Ledger, tree: TreeFigures, arriving: tuple[int, int]
) -> tuple[PoolFigures, ...]:
    """Each pool, in the order of `asked`: pages, states, pages of span components.

    `arriving`: pages and states that operations own until their copies have ended.
    """
    kv, state = ledger.kv, ledger.state
    pages_arriving, states_arriving = arriving
    more = (*asked[2:], *(0 for _ in ledger.spans))
    return (
        PoolFigures(
            *("kv", asked[0], kv.extent, kv.room, kv.parked),
            tree.pages_evictable,
            tree.pages_protected,
            kv.granted - pages_arriving,
            tree.pages_leaving + pages_arriving,
            kv.place_bytes,
            kv.room - kv.free,
        ),
        PoolFigures(
            *("state", asked[1], state.extent, state.room, state.parked),
            tree.states_evictable,
            tree.states_protected,
            state.granted - states_arriving,
            tree.states_leaving + states_arriving,
            state.place_bytes,
            state.room - state.free,
        ),
        *(
            PoolFigures(
                *(pool.component, more[number], pool.size, pool.free, pool.parked),
                *(held.evictable, held.protected, pool.granted, 0, pool.place_bytes),
            )
            for number, (pool, held) in enumerate(zip(ledger.spans, tree.spans, strict=True))
        ),
    )
