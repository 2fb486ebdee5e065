"""How much memory is free, and whether an error says that there was too little."""

from __future__ import annotations

import errno
import gc
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit of this process's container and what is used of it, in versions 2 and 1."""
WORDS = ("DefaultCPUAllocator", "std::bad_alloc", "can't start new thread")
"""What errors without a class of their own say where the machine's memory ran out."""
UNLOADED = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
"""What an import says of a library for which there is no room."""
NO_MEMORY = ("static TLS", "Operation not permitted")
"""What it says as well where something else is wrong."""
LIBRARIES, LIBRARIES_WITH_CUDA = int(1.5 * 2**30), int(3.6 * 2**30)
"""Bytes of addresses, about, that torch and SciPy take when they are loaded; with CUDA's libraries
(torch 2.11: 3.1 GiB, and an attack did not begin below 3.5)."""


class TooFewAddresses(MemoryError):
    """The shell's limit has no room for the libraries."""

    advice = "Raise the limit with ulimit -v"


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on the device: of the GPU, or of the machine or container;
    None where neither tells."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    known = [free for free in (_free_in_machine(), *map(_free_in_group, CGROUPS)) if free]
    return min(known, default=None)


def _free_in_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available[0]) * 1024 if available else None


def _free_in_group(files: tuple[str, str]) -> int | None:
    try:
        limit, used = (Path(file).read_text(encoding="ascii").strip() for file in files)
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return None


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        of_a_process = not hasattr(error, "characters_written")  # else of a full pipe
        return error.errno == errno.ENOMEM or (error.errno == errno.EAGAIN and of_a_process)
    if isinstance(error, ImportError):
        said = str(error)
        return any(words in said for words in UNLOADED) and not any(w in said for w in NO_MEMORY)
    said = str(error) if isinstance(error, RuntimeError) else ""
    torch = sys.modules.get("torch")  # where it is not imported, the error is not torch's
    return any(words in said for words in WORDS) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    )


def check_address_space() -> None:
    """Raise where a limit of the shell (ulimit -v) has no room for the libraries: some of them try
    for ever to get memory while they are loaded, and listen to no signal."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    torch_package = importlib.util.find_spec("torch")
    places = (torch_package and torch_package.submodule_search_locations) or []
    cuda = any((Path(place) / "lib" / "libtorch_cuda.so").is_file() for place in places)
    needed = LIBRARIES_WITH_CUDA if cuda else LIBRARIES
    if limit < needed:
        raise TooFewAddresses(
            f"ulimit -v allows {limit / 2**30:.1f} GiB of addresses, and torch and its libraries "
            f"take about {needed / 2**30:.1f} GiB before any work"
        )


def give_back(device: torch.device) -> None:
    """Free what nothing refers to any more."""
    gc.collect(1)  # what an error left is young; all generations take a second
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
