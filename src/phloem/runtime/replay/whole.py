"""The whole runtime, served a trace one request after another: its pools, its tiers, its border.

The actors are those of production, without an event loop. Pools are on torch's `meta` device, and
hold nothing; bytes are counted in units, so that a terabyte of them is no more than its numbers. A
copy takes no time: it ends before the caller looks again. Running requests take room as they do in
production: pages for all they compute, and a working state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeVar

import torch

from phloem.actors.domain import Parked
from phloem.actors.tree.core import WritePolicy
from phloem.actors.tree.placement import Placement
from phloem.cuda_streams.engine import CopyEngine, Post, Ticket
from phloem.cuda_streams.host import HostMemory
from phloem.cuda_streams.specs import StateSpec
from phloem.cuda_streams.virtual import VirtualEngine
from phloem.errors import InvalidRequest, NoRoom
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.config import CacheConfig
from phloem.runtime.costs.model import Geometry
from phloem.runtime.layout import ModelLayout
from phloem.runtime.replay.requests import ReplayRequest
from phloem.runtime.replay.served import Decision, Totals
from phloem.runtime.request import Request

__all__ = ["WholeReplay"]

T = TypeVar("T")
_UNIT = 1024  # bytes that are counted as one, where pages are large enough
_ALL = 1 << 30  # blocks: a pass is as long as it may be


class _Posted:
    """What is to run next, in order, and a clock that stands still: copies take no time."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()

    def __call__(self, fn: Callable[[], None]) -> None:
        self._queue.append(fn)

    def now_ns(self) -> int:
        """Always the same instant."""
        return 0

    def call_at(self, when_ns: int, fn: Callable[[], None]) -> None:
        """As soon as it is served, whenever that was to be."""
        del when_ns
        self._queue.append(fn)

    def serve(self) -> bool:
        """Call all that is posted, and what that posts; whether there was anything."""
        served = bool(self._queue)
        while self._queue:
            self._queue.popleft()()
        return served


def _nowhere(count: int, row_bytes: int) -> HostMemory:
    rows = torch.empty((count, row_bytes), dtype=torch.uint8, device="meta")
    return HostMemory(rows, max(1, count))


class WholeReplay:
    """A runtime with so many device and host bytes; without `states_share`, one memory for both."""

    def __init__(
        self,
        geometry: Geometry,
        block_size: int,
        *,
        capacity: int,
        host: int = 0,
        states_share: float | None = None,
        write_policy: WritePolicy = "write_through",
        policy: str = "benefit",
        placement: Placement | None = None,
        sessions: bool = False,
    ) -> None:
        page_bytes = geometry.kv_bytes * block_size
        self._unit = unit = _UNIT if page_bytes >= 64 * _UNIT else 1
        page = 2 * max(1, round(page_bytes / unit / 2))  # keys and values
        state = max(1, round(geometry.state_bytes / unit))
        layout = ModelLayout.hybrid(
            kv_layers=1,
            kv_heads=1,
            head_dim=page // 2,
            kv_dtype="uint8",
            states=[StateSpec("state", (state,), "uint8")],
        )
        units = capacity // unit
        pages = states = 1  # not looked at where one memory is both
        if states_share is not None:
            pages, states = (
                int(units * (1 - states_share) / page),
                int(units * states_share / state),
            )
        too_few = InvalidRequest(
            f"{capacity} bytes, and {host} on the host, are too few for a runtime with pages of "
            f"{page_bytes} bytes and states of {geometry.state_bytes}"
        )
        if min(pages, states) < 1 or 0 < host < unit:
            raise too_few
        config = CacheConfig(
            layout=layout,
            page_size=1,
            state_chunk=1,
            device_pages=pages,
            device_states=states,
            device_bytes=units if states_share is None else 0,
            host_bytes=host // unit,
            write_policy=write_policy,
            eviction=policy,
            placement=placement or Placement(),
            inline=True,
        )
        self.geometry = geometry
        self.block_size = block_size
        self.sessions = sessions
        self.totals = Totals()
        self.number = 0
        self._now_s = 0.0
        self._posted = _Posted()
        try:
            self.cache = CacheRuntime(
                config, device="meta", engine=self._engine, host_memory=_nowhere
            )
        except InvalidRequest:  # it counts in units
            raise too_few from None
        self.cache.start(self._posted, None, lambda: self._now_s)

    def serve(self, request: ReplayRequest) -> Decision:
        """Serve one request from its opening to its end; skipped when it has no room to run."""
        self._now_s = max(self._now_s, request.at_s)
        decision = self._to_end(self._serve(request))
        self._settle()
        self.number += 1
        self.totals.count(request.tokens, decision, self.geometry)
        return decision

    async def _serve(self, asked: ReplayRequest) -> Decision:
        ids, size = asked.ids(), self.block_size
        prompt = max(1, min(len(ids), asked.tokens // size))
        if not ids:
            return Decision(self.number, 0, 0, (), skipped=False, evicted=(0, 0))
        radix = self.cache.core.tree.radix
        pages, states = radix.pages, radix.states
        request = await self.cache.open_request(
            ids[:prompt],
            whole=prompt == asked.matchable,
            session=(asked.session or None) if self.sessions else None,
        )
        kv_prefix, made, skipped = request.match.kv_prefix, list[int](), False
        try:
            await request.allocate(len(ids) - request.computed)
            match = await request.ready()
            while request.computed < match.usable or request.room < len(ids):
                await request.allocate(len(ids) - request.computed)  # less came than was promised
                match = await request.ready()
            kept = pages + len(ids) - match.device, states + (match.state_tier == "host")
            request.extend(ids[prompt:])
            await self._compute(request, len(ids), made)
        except NoRoom:
            request.abort()
            match, kept, skipped = request.match, (pages, states), True
        return Decision(
            request=self.number,
            hit=0 if skipped else match.usable * size,
            prefix=kv_prefix * size,
            states=tuple(at * size for at in made),
            skipped=skipped,
            evicted=(kept[0] - radix.pages, kept[1] + len(made) - radix.states),
            host=0 if skipped else match.host * size,
        )

    async def _compute(self, request: Request, end: int, made: list[int]) -> None:
        """Compute from one wanted position to the next, then to the end; notes states in `made`."""
        radix = self.cache.core.tree.radix
        while request.computed < end:
            _, stop = request.next_stop(_ALL)
            with self.cache.step([request]) as step:
                step.launched({request: stop})
            if stop < end:
                result = await request.checkpoint()
                self._settle()
                if result is not None and result.state == "adopted":
                    made.append(result.published)
        before = radix.states
        await request.finish()
        if radix.states > before:
            made.append(end)

    # -- without a loop ------------------------------------------------------------------------

    def _engine(self, post: Post) -> CopyEngine:
        return VirtualEngine(self._posted, post=post, on_event=self._copied)

    def _copied(self, now_ns: int, event: str, ticket: Ticket, layers: int) -> None:
        del now_ns, layers
        nbytes = ticket.batch.nbytes * self._unit
        if event == "start" and ticket.batch.channel == "d2h":
            self.totals.bytes_to_host += nbytes
        elif event == "start" and ticket.batch.channel == "h2d":
            self.totals.bytes_to_device += nbytes

    def _settle(self) -> None:
        """All that is under way ends."""
        core = self.cache.core
        while self._posted.serve():
            core.domain.drain()
        border = core.tree_actor.border
        self.totals.pages_moved = 0 if border is None else border.pages_moved

    def _to_end(self, work: Coroutine[object, None, T]) -> T:
        """Run a coroutine of the runtime; whatever it waits for has a copy to end first."""
        try:
            self._settle()
            at = work.send(None)
            while True:
                assert isinstance(at, Parked)
                self._settle()
                if at.done():
                    at = work.send(None)
                else:  # nobody else gives anything back
                    at = work.throw(NoRoom(self.cache.core.allocator.figures(0, 0)))
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            work.close()
