"""Processes that train together, forked from the tests' own: they import nothing again."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

from mjp_privacy.core.errors import UserError

SECONDS = 120


def together(folder: Path, number: int, work: Callable[[], object]) -> list[str]:
    """Do it in so many processes, in the environment that torchrun makes; what each raised, by its
    number: "" for nothing, a UserError's text, the traceback of anything else."""
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(number)}
    fork = multiprocessing.get_context("fork")
    processes = []
    for rank in range(number):
        place = {**places, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(fork.Process(target=_one, args=(folder / str(rank), place, work)))
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, "a process did not end"
    return [(folder / str(rank)).read_text() for rank in range(number)]


def _one(said: Path, place: dict[str, str], work: Callable[[], object]) -> None:
    os.environ.update(place)
    import torch

    torch.set_num_threads(1)
    text = ""
    try:
        work()
    except UserError as error:
        text = str(error)
    except BaseException:
        text = traceback.format_exc()
    said.write_text(text)
    os._exit(0)
