"""A forward pass as the cache sees it: what it reads and writes stays until it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from phloem.cuda_streams.engine import Fence, StepTicket, Stream
from phloem.errors import InvalidRequest, TransferFailed
from phloem.events import Context, StepChanged
from phloem.runtime.checks import integer

if TYPE_CHECKING:
    from phloem.runtime.core import Core
    from phloem.runtime.request import Request

__all__ = ["Step"]


class Step:
    """One forward pass of some requests, on a named stream. Used as a context manager.

    Call `launched` once everything the pass runs is enqueued. Without a stream the pass runs
    inside the block and is over at its end. Leaving the block by an exception abandons the step:
    its requests fall back to what they had computed before it.
    """

    def __init__(
        self, core: Core, number: int, requests: Sequence[Request], stream: Stream | None
    ) -> None:
        self._core = core
        self.number = number
        self.requests = tuple(requests)
        self._ticket = StepTicket(stream, post=core.post, label=f"step {number}")
        self._starts = {request.id: request.computed for request in self.requests}
        self._setbacks = {request.id: request.setbacks for request in self.requests}
        self._spans: list[tuple[int, int]] = []  # that it was launched for
        if core.emit is not None:
            context = core.domain.caller_context()
            self._tell("opened", context)
            self.fence.add_callback(lambda: self._tell("over", context))

    @property
    def fence(self) -> Fence:
        """Passes when the step will not touch its memory again."""
        return self._ticket.fence

    @property
    def state(self) -> str:
        """`opened`, `launched`, `ended` or `abandoned`."""
        return self._ticket.state

    def start_of(self, request: Request) -> int:
        """The token at which it began for one of its requests."""
        return self._starts[request.id]

    async def over(self) -> None:
        """Wait until the step will not touch its memory again. A cancelled caller leaves it be."""
        await self.fence.reached()

    def launched(
        self,
        ends: Mapping[Request, int],
        stream: Stream | torch.Stream | None = None,
        *,
        states_at: Mapping[Request, int] | None = None,
    ) -> None:
        """Everything is enqueued; each request will then be computed up to its end in `ends`.

        `stream` is for a pass that runs on another stream than the one it was opened on.
        `states_at` is for kernels that update states late: the position, at or below the end, at
        which the working state of a request is then true.

        Raises `InvalidRequest` for a request that is not of this step or an end that does not fit
        its tokens and room, with nothing changed; `TransferFailed` if what the pass runs on turned
        out not to have arrived since the step was opened.
        """
        late = states_at or {}
        for request in (*ends, *late):
            if request not in self.requests or request not in ends:
                raise InvalidRequest(f"{request} is not of step {self.number}")
        for request in ends:
            if request.setbacks != self._setbacks[request.id]:
                raise TransferFailed(
                    f"step {self.number} was opened on data of {request} that did not arrive",
                    tokens_ok=request.computed,
                )
        reached = {  # as plain integers: a caller's may be those of another library
            request: (integer("end", end), integer("state_at", late.get(request, end)))
            for request, end in ends.items()
        }
        for request, (end, state_at) in reached.items():
            request.check_end(end, state_at)
        self._ticket.launched(None if stream is None else self._core.streams.named(stream))
        self._spans = [(self._starts[request.id], end) for request, (end, _) in reached.items()]
        for request, (end, state_at) in reached.items():
            request.step_launched(end, state_at)
        self._core.watch_pass(self._spans, self.fence)
        self._tell(self.state, self._core.domain.caller_context())

    def end(self) -> None:
        """The pass is done as far as the caller is concerned."""
        self._ticket.end()
        self._tell(self.state, self._core.domain.caller_context())

    def abandon(self) -> None:
        """Give the pass up: what it wrote counts for nothing."""
        was_launched = self.state == "launched"
        self._spans.clear()  # it may end early: its time says nothing of how long they take
        self._ticket.abandon()
        for request in self.requests:
            if was_launched and request.setbacks != self._setbacks[request.id]:
                continue  # what it wrote counts for nothing already
            request.step_abandoned(self._starts[request.id], was_launched=was_launched)
        self._tell(self.state, self._core.domain.caller_context())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state == "launched" and kind is None:
            self.end()
        elif self.state in ("opened", "launched"):
            self.abandon()

    def _tell(self, state: str, context: Context) -> None:
        if self._core.emit is not None:
            self._core.emit(
                StepChanged(
                    context=context,
                    step=self.number,
                    state=state,
                    requests=[request.id for request in self.requests],
                    ends=[request.computed for request in self.requests],
                )
            )
