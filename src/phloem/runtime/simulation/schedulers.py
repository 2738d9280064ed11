"""Simulated schedulers: continuous batching with chunked prefill over phloem's public API.

`Server` is an ordinary asyncio program, short enough to be read as an example of integrating the
cache. Every request is a task that opens a request of the cache, computes it chunk by chunk, and
publishes on the way; one more task forms a forward pass of what is waiting to be computed and
launches it on a stream. What the schedulers differ in is who is admitted next (`Order`):

fcfs       first come, first served
shortest   the shortest prompt first
longest    the longest prefix match first, looked up again at each admission
priority   the most urgent first; less urgent requests give way when there is no room
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from phloem.cuda_streams.engine import CopyFailed
from phloem.cuda_streams.virtual import VirtualStream
from phloem.errors import CacheReset, EngineDead, InvalidRequest, NoRoom, StaleHandle
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.request import Request
from phloem.runtime.simulation.model import Chunk, SimModel
from phloem.runtime.simulation.tags import TaggedTokens
from phloem.runtime.simulation.workloads import Prompt

__all__ = ["ORDERS", "Limits", "Preempted", "Server", "Served", "StepFailed"]


class Preempted(Exception):
    """A request gave its room to others; it starts again from what is cached by then."""


class StepFailed(Exception):
    """A forward pass did not happen; its requests try again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server may do at once.

    `chunk`: tokens of one prompt in a pass. `batch_tokens`: tokens of a pass. `running`: requests
    that are admitted. `reserve`: ask for room for the whole answer at once; otherwise page by page,
    which admits more and has to preempt. `ahead`: passes that may be launched and not over.
    `stride`: tokens that one pass adds to an answer. `tries`: a request that was preempted so often
    is refused. `samples`: answers to each prompt; all but one by forks. `join_s`: how long a
    request waits for another one that computes what it needs. `snapshots`: chunks are not cut where
    a state is wanted; the kernel writes it into a slot on the way.
    """

    chunk: int = 16
    batch_tokens: int = 64
    running: int = 8
    reserve: bool = True
    ahead: int = 1
    stride: int = 1
    room_timeout_s: float | None = None
    tries: int = 20
    samples: int = 1
    join_s: float | None = None
    snapshots: bool = False


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went. `how`: `finished`, or `refused` with the reason in `why`."""

    name: str
    how: str
    why: str = ""
    prompt: int = 0
    reused: int = 0
    output: int = 0
    preempted: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


class Job:
    """A prompt on its way through the server."""

    def __init__(self, prompt: Prompt, number: int, now: float) -> None:
        self.prompt = prompt
        self.number = number
        self.arrived = now
        self.admitted = 0.0
        self.first_token = 0.0
        self.reused = 0
        self.preempted = 0
        self.give_way = False  # asked to free its room at its next chunk
        self.turn: asyncio.Event = asyncio.Event()


Order = Callable[[Sequence[Job], CacheRuntime], Job]


def fcfs(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job that has waited longest."""
    del cache
    return min(waiting, key=lambda job: job.number)


def shortest(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job with the shortest prompt."""
    del cache
    return min(waiting, key=lambda job: (len(job.prompt.tokens), job.number))


def longest(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The job with the longest usable prefix at this moment."""
    matches = [
        cache.nowait.match(job.prompt.tokens, namespace=job.prompt.namespace) for job in waiting
    ]
    ranked = zip(waiting, matches, strict=True)
    return min(ranked, key=lambda pair: (-pair[1].usable, pair[0].number))[0]


def priority(waiting: Sequence[Job], cache: CacheRuntime) -> Job:
    """The most urgent job."""
    del cache
    return min(waiting, key=lambda job: (job.prompt.priority, job.number))


ORDERS: Mapping[str, Order] = {
    "fcfs": fcfs,
    "shortest": shortest,
    "longest": longest,
    "priority": priority,
}


class Server:
    """Serves prompts over one cache, one model and one stream. Use as `async with`.

    `fails()` says whether the next pass fails, before or after it was launched.
    """

    def __init__(
        self,
        cache: CacheRuntime,
        model: SimModel,
        stream: VirtualStream,
        *,
        order: str = "fcfs",
        limits: Limits | None = None,
        fails: Callable[[], bool] = bool,
    ) -> None:
        if order not in ORDERS:
            raise InvalidRequest(f"no order is called {order!r}; there are {tuple(ORDERS)}")
        self.cache = cache
        self.model = model
        self.limits = limits or Limits()
        self._stream = stream
        self._order = ORDERS[order]
        self._preempts = order == "priority"
        self._fails = fails
        self._now = asyncio.get_running_loop().time
        self._numbers = 0
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._chunks: list[tuple[Chunk, asyncio.Future[None]]] = []
        self._work = asyncio.Event()
        self._in_flight: list[asyncio.Future[None]] = []
        self._batcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Server:
        self._batcher = asyncio.create_task(self._form_batches(), name="batcher")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._batcher is not None
        self._batcher.cancel()
        with suppress(asyncio.CancelledError):
            await self._batcher

    # -- one request ---------------------------------------------------------------------------

    async def serve(self, prompt: Prompt) -> Served:
        """Serve one prompt to its end. A cancelled caller leaves nothing behind.

        Who hears of a reset in the middle (`CacheReset` while it waits for room or a load) or of
        somebody else's abort (`StaleHandle`) starts again, as a client would: of such a request
        nothing is lost but what it had computed.
        """
        self._numbers += 1
        job = Job(prompt, self._numbers, self._now())
        while True:
            await self._admitted(job)
            try:
                return await self._attempt(job)
            except (Preempted, StepFailed, CacheReset, StaleHandle):
                job.preempted += 1
            except NoRoom as error:
                if not (error.deadlock or len(self._running) > 1):
                    return self._served(job, "refused", f"no room: {error.figures}")
                job.preempted += 1
            except (CopyFailed, EngineDead) as error:
                if isinstance(error, EngineDead) or job.preempted >= self.limits.tries:
                    return self._served(job, "refused", type(error).__name__)
                job.preempted += 1
            finally:
                self._running.remove(job)
                self._admit()
            if job.preempted > self.limits.tries:
                return self._served(job, "refused", "it had to give way too often")

    async def _attempt(self, job: Job) -> Served:
        prompt, limits = job.prompt, self.limits
        tokens = TaggedTokens(prompt.tokens, prompt.namespace, self.cache.config.page_size)
        name = f"{prompt.name}/{job.number}.{job.preempted}"
        async with self.cache.request(
            prompt.tokens, id=name, namespace=prompt.namespace
        ) as request:
            room = len(tokens) - request.computed + (prompt.output if limits.reserve else 0)
            if not limits.reserve:
                room = min(room, limits.chunk)
            await self._allocate(job, request, room)
            await request.ready()
            if limits.join_s is not None:
                await request.join(timeout=limits.join_s)
            await self._prefill(job, request, tokens)
            job.reused = request.match.usable
            for number in range(1, limits.samples):
                await self._decode_fork(job, request, tokens.copy(), number)
            await self._decode(job, request, tokens)
            await request.finish()
            return self._served(job, "finished", output=len(tokens) - len(prompt.tokens))

    async def _prefill(self, job: Job, request: Request, tokens: TaggedTokens) -> None:
        while request.computed < len(tokens):
            self._check_turn(job)
            if not request.resources().get("steps"):
                await request.advance()
            start, end = request.next_stop(self.limits.chunk)
            snapshot: tuple[int, int] | None = None
            if self.limits.snapshots:
                end = min(start + self.limits.chunk, len(tokens))
                snapshot = self._snapshot(request, end)
            await self._room_for(job, request, end)
            chunk = Chunk(request, tokens, start, end, snapshot)
            try:
                await self._compute(chunk, wait=end == len(tokens))
            except StepFailed:
                await self._again(request)
                continue
            await request.checkpoint()
        job.first_token = job.first_token or self._now()

    async def _again(self, request: Request) -> None:
        """Get ready after a pass that failed, where the tree still has the state to go on from."""
        if request.computed != request.boundary:
            raise Preempted(request.id)
        await self._steps_over(request)
        try:
            await request.ready()
        except InvalidRequest as error:  # the boundary has no state, or has lost it
            raise Preempted(request.id) from error

    def _snapshot(self, request: Request, end: int) -> tuple[int, int] | None:
        """A slot for the first wanted state that the chunk passes, if there is one to be had."""
        for wanted in request.wanted:
            if wanted.position < end:
                slot = request.try_snapshot_slot(wanted.position)
                return None if slot is None else (slot, wanted.position)
        return None

    async def _decode_fork(
        self, job: Job, request: Request, tokens: TaggedTokens, number: int
    ) -> None:
        """Another answer to the same prompt, by a request that shares its prefix."""
        try:
            twin = await request.fork(f"{request.id}+{number}")
        except (NoRoom, StaleHandle):
            return  # one answer is enough when there is no room, or nothing to share after a reset
        try:
            await self._decode(job, twin, tokens, number)
            await twin.finish()
        except NoRoom:
            return
        finally:
            twin.abort()

    async def _decode(
        self, job: Job, request: Request, tokens: TaggedTokens, number: int = 0
    ) -> None:
        wanted = len(job.prompt.tokens) + job.prompt.output
        while len(tokens) < wanted:
            self._check_turn(job)
            said = [self.model.sampled(tokens) + number]
            said += [0] * min(self.limits.stride - 1, wanted - len(tokens) - 1)
            tokens.extend(said)
            request.extend(said)
            if len(tokens) == wanted:
                return  # the last token needs no KV: nothing is computed from it
            await self._room_for(job, request, len(tokens), wait=not number)
            start = request.computed
            await self._compute(Chunk(request, tokens, start, len(tokens)), wait=True)

    async def _room_for(self, job: Job, request: Request, end: int, *, wait: bool = True) -> None:
        if end <= request.room:
            return
        if wait:
            await self._allocate(job, request, end - request.computed)
        else:  # a fork: its parent holds room meanwhile, and nobody could know that it waits
            await request.allocate(end - request.computed, wait=False)

    async def _allocate(self, job: Job, request: Request, tokens: int) -> None:
        if self._preempts:
            try:
                await request.allocate(tokens, wait=False)
                return
            except NoRoom:
                self._ask_to_give_way(job)
        await request.allocate(tokens, timeout=self.limits.room_timeout_s)

    # -- who may run ---------------------------------------------------------------------------

    async def _admitted(self, job: Job) -> None:
        """Wait until it is the job's turn; it is then in `_running`."""
        job.turn.clear()
        job.give_way = False
        self._waiting.append(job)
        self._admit()
        try:
            await job.turn.wait()
        except asyncio.CancelledError:
            (self._running if job.turn.is_set() else self._waiting).remove(job)
            self._admit()
            raise
        job.admitted = job.admitted or self._now()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.running:
            job = self._order(self._waiting, self.cache)
            self._waiting.remove(job)
            self._running.append(job)
            job.turn.set()

    def _ask_to_give_way(self, job: Job) -> None:
        """The least urgent of those that are less urgent than `job` gives way."""
        urgent = job.prompt.priority
        victims = [other for other in self._running if other.prompt.priority > urgent]
        if victims:
            victim = max(victims, key=lambda other: (other.prompt.priority, other.number))
            victim.give_way = True

    def _check_turn(self, job: Job) -> None:
        if job.give_way:
            raise Preempted(job.prompt.name)

    # -- forward passes ------------------------------------------------------------------------

    async def _compute(self, chunk: Chunk, *, wait: bool) -> None:
        """Have a chunk computed: launched, or over when its result is needed (`wait`)."""
        done = asyncio.get_running_loop().create_future()
        self._chunks.append((chunk, done))
        self._work.set()
        try:
            await done
        finally:
            self._chunks = [entry for entry in self._chunks if entry[1] is not done]
        if wait:
            await self._steps_over(chunk.request)

    async def _steps_over(self, request: Request) -> None:
        for fence in request.fences():
            over = asyncio.Event()
            fence.add_callback(over.set)
            await over.wait()

    async def _form_batches(self) -> None:
        """Launch passes of what waits, as many ahead as allowed."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._chunks:
                while len(self._in_flight) >= self.limits.ahead:
                    await asyncio.shield(self._in_flight[0])
                self._launch(self._next_batch())

    def _next_batch(self) -> list[tuple[Chunk, asyncio.Future[None]]]:
        """What waits, within the budget; short chunks, so answers, go first."""
        batch: list[tuple[Chunk, asyncio.Future[None]]] = []
        later: list[tuple[Chunk, asyncio.Future[None]]] = []
        budget = self.limits.batch_tokens
        for entry in sorted(self._chunks, key=lambda entry: entry[0].end - entry[0].start):
            size = entry[0].end - entry[0].start
            if size <= budget or not batch:
                batch.append(entry)
                budget -= size
            else:
                later.append(entry)
        self._chunks = later
        return batch

    def _launch(self, batch: Sequence[tuple[Chunk, asyncio.Future[None]]]) -> None:
        """One forward pass. Its step is over when the stream has passed what was enqueued."""
        for chunk, done in batch:
            if chunk.request.status == "aborted" and not done.done():
                done.set_exception(StaleHandle(f"{chunk.request} was aborted"))
        chunks = [chunk for chunk, done in batch if not done.done()]
        if not chunks:
            return
        requests = [chunk.request for chunk in chunks]
        failed: StepFailed | None = None
        try:
            with self.cache.step(requests, stream=self._stream) as step:
                if self._fails():
                    raise StepFailed("before it was launched")
                self.model.enqueue(chunks, self._stream)
                step.launched({chunk.request: chunk.end for chunk in chunks})
                if self._fails():
                    raise StepFailed("after it was launched")
        except StepFailed as error:
            failed = error
        else:
            over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._in_flight.append(over)
            step.fence.add_callback(lambda: self._over(over))
        for _, done in batch:
            if not done.done():
                if failed is None:
                    done.set_result(None)
                else:
                    done.set_exception(failed)

    def _over(self, step: asyncio.Future[None]) -> None:
        self._in_flight.remove(step)
        if not step.done():
            step.set_result(None)

    def _served(self, job: Job, how: str, why: str = "", output: int = 0) -> Served:
        now = self._now()
        return Served(
            name=job.prompt.name,
            how=how,
            why=why,
            prompt=len(job.prompt.tokens),
            reused=job.reused,
            output=output,
            preempted=job.preempted,
            queued_s=job.admitted - job.arrived,
            first_token_s=job.first_token - job.arrived if job.first_token else 0.0,
            total_s=now - job.arrived,
        )
