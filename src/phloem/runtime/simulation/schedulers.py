"""Simulated schedulers: continuous batching with chunked prefill over phloem's public API.

`Server` is an ordinary asyncio program, short enough to be read as an example of integrating the
cache. Every request is a task that opens a request of the cache, computes it chunk by chunk, and
publishes on the way; one more task forms a forward pass of what is waiting to be computed and
launches it on a stream. What the schedulers differ in is who is admitted next: see `jobs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from phloem.cuda_streams.engine import CopyFailed
from phloem.cuda_streams.virtual import VirtualStream
from phloem.errors import (
    CacheReset,
    EngineDead,
    InvalidRequest,
    NoRoom,
    StaleHandle,
    TransferFailed,
)
from phloem.runtime.cache import CacheRuntime
from phloem.runtime.opening import RequestOptions
from phloem.runtime.request import Request
from phloem.runtime.simulation.jobs import ORDERS, Job, Limits, Preempted, Served, StepFailed
from phloem.runtime.simulation.model import Chunk, SimModel, Violation
from phloem.runtime.simulation.tags import TaggedTokens
from phloem.runtime.simulation.workloads import Prompt

__all__ = ["Server"]


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
        self._by_priority = order == "priority"
        self._preempts = self._by_priority or self.limits.suspends
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
        if self.limits.prefetches:
            await self.cache.prefetch(prompt.tokens, namespace=prompt.namespace)
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
                self._leave(job)
            if job.preempted > self.limits.tries:
                return self._served(job, "refused", "it had to give way too often")

    async def _attempt(self, job: Job) -> Served:
        prompt, limits = job.prompt, self.limits
        tokens = TaggedTokens(prompt.tokens, prompt.namespace, self.cache.config.page_size)
        async with self.cache.request(
            prompt.tokens,
            join=limits.joins_at_open,
            join_timeout=limits.join_s,
            **self._options(job),
        ) as request:
            room = len(tokens) - request.computed + (prompt.output if limits.reserve else 0)
            if not limits.reserve:
                room = min(room, limits.chunk)
            await self._allocate(job, request, room)
            if limits.early:
                await self._start_early(job, request, tokens)
            await self._ready(job, request)
            if limits.join_s is not None and not limits.joins_at_open:
                await request.join(timeout=limits.join_s)
            await self._prefill(job, request, tokens)
            job.reused = request.match.usable
            for number in range(1, limits.samples):
                await self._decode_fork(job, request, tokens.copy(), number)
            await self._decode(job, request, tokens)
            await request.finish()
            if limits.sessions and prompt.session and prompt.ends_session:
                await self.cache.close_session(prompt.session)
            return self._served(job, "finished", output=len(tokens) - len(prompt.tokens))

    def _options(self, job: Job) -> RequestOptions:
        """How the job's next attempt is opened."""
        prompt, limits = job.prompt, self.limits
        options: RequestOptions = {
            "id": f"{prompt.name}/{job.number}.{job.preempted}",
            "namespace": prompt.namespace,
        }
        if limits.sessions:
            options["session"] = prompt.session or None
            options["session_ttl"] = limits.session_ttl_s
            options["priority"] = max(0, 100 - 40 * prompt.priority)
            options["keep_for"] = limits.session_ttl_s
        return options

    async def _ready(self, job: Job, request: Request, *, spoilt: bool = False) -> None:
        """Wait for what the request stands on; less than was promised may take room, and again.

        `spoilt`: a pass that was given up may have written the working state.
        """
        while True:
            try:
                with suppress(TransferFailed):  # what ran too early counts for nothing
                    await request.ready()
            except InvalidRequest as error:
                if not spoilt or request.computed != request.boundary:
                    raise
                raise Preempted(request.id) from error  # the boundary has no state, or has lost it
            if request.status == "running":
                return
            await self._allocate(job, request, min(self.limits.chunk, request.length))

    async def _start_early(self, job: Job, request: Request, tokens: TaggedTokens) -> None:
        """Launch the first pass behind what it needs. What it read is in doubt until then."""
        await request.wait_on(self._stream)
        start, end = request.next_stop(self.limits.chunk)
        await self._room_for(job, request, end)
        doubts: list[Violation] = []
        setbacks = request.setbacks
        try:
            await self._compute(Chunk(request, tokens, start, end, None, doubts), wait=True)
        except StepFailed:
            await self._steps_over(request)  # it counts for nothing, and it may still run
            await self._ready(job, request, spoilt=True)
            return
        await self._ready(job, request)
        if doubts and request.setbacks == setbacks:
            self.model.fail(doubts[0])

    async def _prefill(self, job: Job, request: Request, tokens: TaggedTokens) -> None:
        while request.computed < len(tokens):
            await self._give_way(job, request)
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
                await self._again(job, request)
                continue
            await request.checkpoint()
        job.first_token = job.first_token or self._now()

    async def _again(self, job: Job, request: Request) -> None:
        """Get ready after a pass that failed, where the tree still has the state to go on from."""
        if request.computed != request.boundary:
            raise Preempted(request.id)
        await self._steps_over(request)
        await self._ready(job, request, spoilt=True)

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
        if self.cache.config.layout.spans and request.computed % self.cache.grid:
            return  # the window is not copied, so it can only be shared where the tree has it
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
            if number and job.give_way:
                raise Preempted(request.id)
            if await self._give_way(job, request):
                await self._prefill(job, request, tokens)
            said = [self.model.sampled(tokens) + number]
            said += [0] * min(self.limits.stride - 1, wanted - len(tokens) - 1)
            tokens.extend(said)
            request.extend(said)
            if len(tokens) == wanted:
                return  # the last token needs no KV: nothing is computed from it
            chunk = self._with_drafts(request, tokens)
            await self._room_for(job, request, chunk.end, wait=not number)
            await self._compute(chunk, wait=True)
            if chunk.end > len(tokens):
                await request.rollback(len(tokens))

    def _with_drafts(self, request: Request, tokens: TaggedTokens) -> Chunk:
        """What comes next; where the state can be had back, with guesses behind it."""
        start, end, drafts = request.computed, len(tokens), self.limits.drafts
        plain = Chunk(request, tokens, start, end)
        snapshot: tuple[int, int] | None = None
        if not drafts:
            return plain
        if self.cache.config.layout.has_states:
            slot = None if end % self.cache.grid else request.try_snapshot_slot(end)
            if slot is None:
                return plain
            snapshot = slot, end
        guesses = [self.model.sampled(tokens) + 1] * drafts
        longer = tokens.copy()
        longer.extend(guesses)
        request.extend(guesses)
        return Chunk(request, longer, start, len(longer), snapshot)

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

    def _leave(self, job: Job) -> None:
        """It runs no more, and the next one may."""
        if job in self._running:  # not when it was cancelled while it waited for another turn
            self._running.remove(job)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.running:
            job = self._order(self._waiting, self.cache)
            self._waiting.remove(job)
            self._running.append(job)
            job.turn.set()

    def _ask_to_give_way(self, job: Job) -> None:
        """The least urgent of those that are less urgent than `job` gives way.

        Unless urgency is what orders them, those are less urgent that came later.
        """
        victim = max(self._running, key=self._rank)
        if self._rank(victim)[0] > self._rank(job)[0]:
            victim.give_way = True

    def _rank(self, job: Job) -> tuple[int, int]:
        return (job.prompt.priority if self._by_priority else job.number, job.number)

    async def _give_way(self, job: Job, request: Request) -> bool:
        """If it was asked to, a job frees its room; True when it goes on after that.

        It starts again, or is suspended until its turn comes again. While it keeps its lease it
        does not wait for a turn: others might wait for what the lease protects.
        """
        if not job.give_way:
            return False
        if not self.limits.suspends:
            raise Preempted(request.id)
        job.preempted += 1
        job.give_way = False
        await request.suspend(keep_lease=self.limits.keeps_lease)
        if not self.limits.keeps_lease:
            self._leave(job)
            await self._admitted(job)
        await request.resume()
        await self._allocate(job, request, min(self.limits.chunk, request.length))
        await self._ready(job, request)
        return True

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
                spoil = self.model.enqueue(chunks, self._stream)
                step.launched({chunk.request: chunk.end for chunk in chunks})
                if self._fails():
                    spoil()
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
