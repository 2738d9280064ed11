"""`anyio.to_thread` on a simulated loop.

anyio keeps worker threads of its own and has no place to put others, so the method by which its
asyncio backend runs something in a thread is replaced, once, by one that asks which loop runs. On
other loops it does what it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import cache
from typing import TypeVar, TypeVarTuple

from anyio import CancelScope, CapacityLimiter
from anyio._backends._asyncio import AsyncIOBackend

from phloem.cuda_streams.lockstep import SimulatedLoop

__all__ = ["simulate_anyio_threads"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@cache
def simulate_anyio_threads() -> None:
    """Have `anyio.to_thread.run_sync` go through the executor of loops that are simulated."""
    real = AsyncIOBackend.run_sync_in_worker_thread

    async def run_sync(
        func: Callable[[*Ts], T],
        args: tuple[*Ts],
        abandon_on_cancel: bool = False,
        limiter: CapacityLimiter | None = None,
    ) -> T:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulatedLoop):
            return await real(func, args, abandon_on_cancel, limiter)
        await AsyncIOBackend.checkpoint()
        async with limiter or AsyncIOBackend.current_default_thread_limiter():
            context = copy_context()
            work = asyncio.get_running_loop().run_in_executor(
                None, lambda: context.run(func, *args)
            )
            try:
                with CancelScope(shield=not abandon_on_cancel):
                    await asyncio.wait([work])
            finally:
                work.cancel()
            return work.result()

    # Not to be had otherwise: anyio chooses backends by name, and this one is called asyncio, too.
    setattr(AsyncIOBackend, "run_sync_in_worker_thread", staticmethod(run_sync))  # noqa: B010
