"""A serving loop for one hybrid model: the example of how a framework uses the cache.

Prompts are prefilled one after another in order of arrival, in chunks that end at multiples of
`chunk`; requests that have their first token decode together in one batch. Prefill goes first: a
decode step runs only when no prompt is being computed. The model runs on one worker thread.

Each request is one coroutine in its caller's task (`generate`), so a caller that is cancelled
leaves the `async with` of its request, which gives back everything it owned.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, Protocol, Self, TypeVar

from phloem.errors import InvalidRequest, NoRoom, RuntimeClosed, TransferFailed
from phloem.runtime.integrations.transformers import ModelCache, Row, TransformersModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from torch import Tensor

    from phloem.cuda_streams.fences import Fence
    from phloem.cuda_streams.landing import Landing
    from phloem.cuda_streams.pools import DevicePools
    from phloem.cuda_streams.workers import WorkerStream

__all__ = ["Completion", "HybridServer"]


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    computed: int
    """Prompt tokens that the model ran on; the others were reused."""
    first_token_s: float
    """Seconds from the call to the first token."""
    total_s: float
    logits: tuple[Tensor, ...]
    """The logits that each token was chosen from, [vocabulary]; empty unless asked for."""

    @property
    def reused(self) -> int:
        """Prompt tokens that came from the cache."""
        return self.prompt_tokens - self.computed


Publish = Literal["all", "prompt", "none"]
"""What a finished request leaves in the cache."""


class Request(Protocol):
    """What the server needs of a request of the runtime."""

    @property
    def computed(self) -> int: ...
    @property
    def state_slot(self) -> int | None: ...
    async def allocate(self, tokens: int, *, wait: bool = True) -> object: ...
    async def ready(self) -> object: ...
    async def landing(self) -> Landing: ...
    async def advance(self) -> object: ...
    async def checkpoint(self) -> object: ...
    async def finish(self, *, publish: Publish) -> object: ...
    def extend(self, tokens: Sequence[int]) -> object: ...
    def next_stop(self, limit: int) -> tuple[int, int]: ...
    def try_snapshot_slot(self, position: int) -> int | None: ...
    def page_table(self) -> Sequence[int]: ...


R = TypeVar("R", bound=Request)


class Step(Protocol[R]):
    """What the server needs of a step."""

    @property
    def fence(self) -> Fence: ...
    def launched(self, ends: Mapping[R, int]) -> object: ...


class Cache(Protocol[R]):
    """What the server needs of the runtime, which `BareCache` has too."""

    @property
    def pools(self) -> DevicePools: ...
    def request(
        self, tokens: Sequence[int], *, id: str | None = None
    ) -> AbstractAsyncContextManager[R]: ...
    def step(
        self, requests: Sequence[R], *, stream: WorkerStream
    ) -> AbstractContextManager[Step[R]]: ...


async def _over(step: Step[R]) -> None:
    """Waits until the worker is done with the step; cancelled, it leaves the step to its end."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    step.fence.add_callback(lambda: None if over.done() else over.set_result(None))
    await over


@dataclass(eq=False)
class _Answer(Generic[R]):
    """A request that decodes: what the decode loop needs to know of it."""

    request: R
    max_new: int
    done: asyncio.Future[None]
    length: int
    tokens: list[int] = field(default_factory=list[int])
    logits: list[Tensor] = field(default_factory=list["Tensor"])

    def take(self, logits: Tensor, keep: bool) -> None:
        """Takes the greedy token."""
        self.tokens.append(int(logits.argmax()))
        if keep:
            self.logits.append(logits)

    def row(self) -> Row:
        """Where its data is."""
        return _row(self.request, self.length)


def _row(request: Request, length: int) -> Row:
    return Row(request.page_table(), length, request.state_slot)


class HybridServer(Generic[R]):
    """Serves one model through a cache; see the module.

        async with HybridServer(model, cache, stream) as server:
            completion = await server.generate(prompt, max_new=16)

    `chunk` is a multiple of the cache's grid. If it equals the grid, a prompt is computed at the
    same boundaries whatever was reused, and its logits are the same bits.

    A prompt's first chunk is computed while what it reuses is on its way: each layer of the model
    waits for its own part. `by_layer=False` waits for all of it first.
    """

    def __init__(
        self,
        model: TransformersModel,
        cache: Cache[R],
        stream: WorkerStream,
        *,
        chunk: int,
        batch_max: int = 16,
        publish: Publish = "prompt",
        keep_logits: bool = False,
        by_layer: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if chunk < 1 or batch_max < 1:
            raise InvalidRequest(f"chunk {chunk} and batch_max {batch_max} must be at least 1")
        self.model = model
        self.cache = cache
        self.pools: DevicePools = cache.pools
        self._stream = stream
        self._chunk = chunk
        self._batch_max = batch_max
        self._publish: Publish = publish
        self._keep_logits = keep_logits
        self._by_layer = by_layer
        self._clock = clock
        self._turn = asyncio.Lock()  # whose prompt is computed; in order of arrival
        self._may_decode = asyncio.Event()
        self._answers: list[_Answer[R]] = []
        self._batch: tuple[list[_Answer[R]], ModelCache] | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop_task = asyncio.create_task(self._decode_loop(), name="phloem-decode")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the decode loop; all requests get `RuntimeClosed`, at the latest after a pass."""
        task, self._loop_task = self._loop_task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])  # who is cancelled meanwhile stays so
        finally:
            self._fail(self._answers, RuntimeClosed("the server was closed"))

    async def generate(
        self, prompt: Sequence[int], max_new: int, *, id: str | None = None
    ) -> Completion:
        """Serves one request; greedy tokens.

        Waits for its turn and for room. A cancelled caller gives everything back. Raises
        `InvalidRequest` for an empty prompt, `NoRoom` if the pools cannot hold it, `RuntimeClosed`
        when the server is closed.
        """
        if not prompt or max_new < 1:
            raise InvalidRequest(f"{len(prompt)} prompt tokens and {max_new} new: at least 1 each")
        self._check_open()
        begun = self._clock()
        async with self.cache.request(prompt, id=id) as request:
            try:
                async with self._turn:
                    self._may_decode.clear()
                    computed, logits = await self._prefill(request, prompt, max_new)
            finally:
                if not self._turn.locked():  # else it was cancelled while it waited for its turn
                    self._may_decode.set()  # the next prompt was woken before, and clears it
            first = self._clock()
            answer = await self._decode(request, logits, len(prompt), max_new)
            await request.finish(publish=self._publish)
        return Completion(
            tokens=tuple(answer.tokens),
            prompt_tokens=len(prompt),
            computed=computed,
            first_token_s=first - begun,
            total_s=self._clock() - begun,
            logits=tuple(answer.logits),
        )

    def _check_open(self) -> None:
        """Raise if the server is closed: nobody decodes for a request any more."""
        if self._loop_task is None:
            raise RuntimeClosed("the server is not running")

    # ------------------------------------------------------------------ prefill

    async def _make_room(self, request: R, tokens: int) -> Landing | None:
        """Allocates for all `tokens` of the request; while it waits, others may decode.

        Returns what the first pass has to wait for, layer by layer; None when nothing.
        """
        landing: Landing | None = None
        while True:
            promised = request.computed
            try:
                await request.allocate(tokens - promised, wait=False)
            except NoRoom:
                self._may_decode.set()
                await request.allocate(tokens - promised)
                self._may_decode.clear()
            if self._by_layer:
                landing = await request.landing()
            else:
                await request.ready()
            if request.computed == promised:  # or less came from the host
                return landing

    async def _prefill(self, request: R, prompt: Sequence[int], max_new: int) -> tuple[int, Tensor]:
        """Computes what is not reused; returns how many tokens and the last logits."""
        self._check_open()
        await request.advance()  # what was published since the request arrived
        landing = await self._make_room(request, len(prompt) + max_new)
        ran: tuple[ModelCache, Tensor] | None = None
        computed, end = 0, -1
        while request.computed < len(prompt):
            await request.advance()
            self._check_open()
            # Gather anew at the first chunk, and when others had published more meanwhile.
            cache = ran[0] if ran is not None and request.computed == end else None
            start, end = request.next_stop(self._chunk)
            with self.cache.step([request], stream=self._stream) as step:
                row, tokens = _row(request, start), prompt[start:end]
                work = self._stream.run(self._prefill_chunk, cache, tokens, start, row, landing)
                step.launched({request: end})
            if landing is not None:
                try:
                    await request.ready()  # before the pass is over: who waits in vain is let go
                except TransferFailed:
                    await _over(step)
                    landing = await self._make_room(request, len(prompt) + max_new)
                    continue
                landing = None
            await _over(step)
            ran = work.result()
            await request.checkpoint()
            computed += end - start
        assert ran is not None, "at least the last token of a prompt is computed"
        return computed, ran[1]

    def _prefill_chunk(
        self,
        cache: ModelCache | None,
        tokens: Sequence[int],
        start: int,
        row: Row,
        landing: Landing | None,
    ) -> tuple[ModelCache, Tensor]:
        """On the worker thread."""
        if cache is None:
            cache = self._gather(row, landing)
        logits = self.model.forward(tokens, cache, start)[-1].cpu()
        self.model.scatter_kv(cache, self.pools, row.pages, start, start + len(tokens))
        if row.slot is not None:
            self.model.store_state(cache, self.pools, row.slot)
        return cache, logits

    def _gather(self, row: Row, landing: Landing | None) -> ModelCache:
        """What a request reuses; a layer that is on its way when the pass comes to it."""
        if landing is None or landing.landed:
            return self.model.gather(self.pools, row.pages, row.length, row.slot)

        def wait(layer: int) -> None:
            landing.wait(layer, self._stream)

        return self.model.gather_late(self.pools, row, wait)

    # ------------------------------------------------------------------ decode

    async def _decode(self, request: R, logits: Tensor, length: int, max_new: int) -> _Answer[R]:
        """Joins the batch and waits for the last token."""
        self._check_open()
        done = asyncio.get_running_loop().create_future()
        answer = _Answer(request, max_new, done, length)
        answer.take(logits, self._keep_logits)
        if max_new == 1:
            return answer
        self._answers.append(answer)
        self._may_decode.set()
        try:
            await done
        finally:
            if answer in self._answers:
                self._answers.remove(answer)
        return answer

    async def _decode_loop(self) -> None:
        while True:
            if not self._answers:
                self._may_decode.clear()
            while not self._may_decode.is_set():
                await self._may_decode.wait()
            answers = self._answers[: self._batch_max]
            try:
                await self._decode_step(answers)
            except Exception as error:  # noqa: BLE001  whose requests they are hear of it
                self._batch = None
                self._fail(answers, error)

    async def _decode_step(self, answers: list[_Answer[R]]) -> None:
        """One token for each; whoever leaves meanwhile is left out of the next."""
        held = self._batch[1] if self._batch and self._batch[0] == answers else None
        snapshots: list[tuple[int, int]] = []
        for answer in answers:
            answer.request.extend(answer.tokens[-1:])
            if (slot := self._snapshot_slot(answer)) is not None:
                snapshots.append((answer.request.state_slot or 0, slot))
        with self.cache.step([a.request for a in answers], stream=self._stream) as step:
            work = self._stream.run(
                self._decode_rows,
                held,
                [answer.tokens[-1] for answer in answers],
                [answer.row() for answer in answers],
                snapshots,
            )
            step.launched({answer.request: answer.length + 1 for answer in answers})
        await _over(step)
        batch, logits = work.result()
        self._batch = (answers, batch)
        for answer, row in zip(answers, logits, strict=True):
            answer.length += 1
            answer.take(row, self._keep_logits)
            if len(answer.tokens) == answer.max_new and answer in self._answers:
                self._answers.remove(answer)
                if not answer.done.done():  # else its caller was cancelled, and is about to leave
                    answer.done.set_result(None)

    def _snapshot_slot(self, answer: _Answer[R]) -> int | None:
        """Where to keep the state after the next token, if another turn could start from it."""
        if self._publish != "all" or (answer.length + 1) % self._chunk:
            return None
        return answer.request.try_snapshot_slot(answer.length + 1)

    def _decode_rows(
        self,
        batch: ModelCache | None,
        tokens: list[int],
        rows: list[Row],
        snapshots: list[tuple[int, int]],
    ) -> tuple[ModelCache, Tensor]:
        """On the worker thread."""
        if batch is None:
            batch = self.model.gather_batch(self.pools, rows)
        logits = self.model.decode(tokens, batch, [row.length for row in rows]).cpu()
        longer = [row._replace(length=row.length + 1) for row in rows]
        self.model.scatter_decoded(batch, self.pools, longer)
        for source, target in snapshots:
            self.model.copy_state(self.pools, source, target)
        return batch, logits

    def _fail(self, answers: Sequence[_Answer[R]], error: Exception) -> None:
        for answer in answers:
            if not answer.done.done():
                answer.done.set_exception(error)
