"""Work in several processes, all of which an interrupt ends at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask, signal
from threading import current_thread, main_thread
from typing import TypeVar

__all__ = ["in_processes"]

Task = TypeVar("Task")
Result = TypeVar("Result")


def in_processes(
    jobs: int,
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    begin: Callable[[], None] | None = None,
) -> Iterator[tuple[Task, Result]]:
    """Each task with `work(task)`, carried out in `jobs` new processes, as they end.

    Each process calls `begin` first. Both functions, the tasks and the results are pickled. Raises
    what `work` raises. An interrupt, and a consumer that has enough, end the processes at once,
    whatever they are doing.
    """
    others = {*active_children()}
    with ProcessPoolExecutor(jobs, get_context("spawn"), begin) as pool:
        try:
            with _interrupts_later():
                waiting = {pool.submit(work, task): task for task in tasks}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:  # also a Ctrl-C, and a consumer that has enough
            for worker in {*active_children()} - others:
                worker.terminate()
            raise


@contextmanager
def _interrupts_later() -> Generator[None, None, None]:
    """A Ctrl-C takes effect at the end of the block, and never in processes that it starts.

    They inherit what is blocked, and leave it to this one to end them. Another thread of this one
    may yet receive it.
    """
    if current_thread() is not main_thread():
        yield
        return
    came: list[int] = []
    handler = signal(SIGINT, lambda number, _: came.append(number))
    mask = pthread_sigmask(SIG_BLOCK, (SIGINT,))
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, mask)
        signal(SIGINT, handler)
    if came:
        raise KeyboardInterrupt
