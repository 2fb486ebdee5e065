"""How many threads compute: one for a run, or one for each of many small matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


def for_each_in_threads(work: Callable[[int], None], number: int) -> None:
    """Does work(0), ..., work(number - 1), as many at a time as torch may use threads.

    Each runs with one thread of its own, so that the results are the same bits whatever the number
    of threads. Decompositions of matrices of a few hundred rows gain nothing from a second one.
    """
    import torch

    threads = min(torch.get_num_threads(), number)
    with one_thread():
        if threads <= 1:
            for index in range(number):
                work(index)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, range(number)):
                pass  # reading the results raises what a thread raised


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that results are the same bits on any number of cores.

    torch.set_num_threads holds for the calling thread in torch, and for all of them in MKL.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread_environment() -> Mapping[str, str]:
    """Environment variables with which a new process, or this one before it imports torch, computes
    with one thread: threads of OpenMP wait for each other busily, and results depend on them."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, "1")
