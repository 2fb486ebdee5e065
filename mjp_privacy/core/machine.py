"""What a figure was computed with: device, memory, threads, commit and seeds.

torch is imported where it is used alone, so that a command's help stays quick.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.text import shown

if TYPE_CHECKING:
    import torch

# device, threads, seeds --------------------------------------------------------------------------

MOST_THREADS = 4096


def pick_device(name: str) -> torch.device:
    """The device for `--device`: auto, cpu or cuda; auto takes CUDA where there is a GPU."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: expected auto, cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device here. Use --device cpu or auto.")
    use_cuda = name != "cpu" and torch.cuda.is_available()
    if use_cuda:  # with TF32, float32 products would have a shorter mantissa than float32's
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    return torch.device("cuda" if use_cuda else "cpu")


def clock(device: torch.device) -> float:
    """The time in seconds, read after the device has finished all work it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.monotonic()


def use_threads(threads: int | None) -> None:
    """Let torch use this many CPU threads; None keeps torch's own number."""
    if threads is None:
        return
    if not 1 <= threads <= MOST_THREADS:
        raise UserError(f"--threads: expected 1 to {MOST_THREADS}, got {shown(threads, 40)}.")
    import torch

    torch.set_num_threads(threads)


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


def derive_seed(*parts: str | int | float) -> int:
    """A 63-bit seed from its parts, such as derive_seed("jigsaw", 0, "cat.png"): the same on every
    machine and Python version."""
    # NumPy's scalars have another repr than Python's, np.int64(3), and must give the same seed.
    plain = [part.item() if hasattr(part, "item") else part for part in parts]
    text = json.dumps([repr(part) for part in plain])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_generator(*parts: str | int | float) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(derive_seed(*parts))


# commit ------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).resolve().parents[1]


def commit() -> str:
    """The checkout's commit, followed by '+' if its code was changed; '' outside a checkout, as
    inside somebody else's repository."""
    code = [str(folder) for folder in (PACKAGE, PACKAGE.with_name("attacks")) if folder.is_dir()]
    name = _git("ls-files", "--", __file__) and _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", *code)
    if not name or changed is None:
        return ""
    return f"{name}+" if changed else name


def _git(*arguments: str) -> str | None:
    """What git prints in the package's folder; None where it fails or is not there."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=PACKAGE, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


# memory ------------------------------------------------------------------------------------------

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit of this process's container and what is used of it, in versions 2 and 1."""
RAN_OUT = ("DefaultCPUAllocator", "std::bad_alloc", "can't start new thread")
"""What errors without a class of their own say where the machine's memory ran out."""


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken on the device: of the GPU, or of the machine or container;
    None where neither tells."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    free = []
    for limit, used in CGROUPS:
        try:
            free.append(max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    return min(filter(None, free), default=None)


BESIDE = "MJP_PRIVACY_WORKERS"
"""Environment variable of a worker: how many there are on its machine, itself included."""


def workers_beside() -> int:
    """How many processes share this machine's memory with this one, itself included."""
    number = os.environ.get(BESIDE, "")
    return max(1, int(number)) if number.isdecimal() else 1


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the CPU or a GPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        of_a_process = not hasattr(error, "characters_written")  # else of a full pipe
        return error.errno == errno.ENOMEM or (error.errno == errno.EAGAIN and of_a_process)
    if isinstance(error, ImportError):  # there is no room for a library, or its disk is noexec
        return "failed to map segment" in str(error) and "not permitted" not in str(error)
    torch = sys.modules.get("torch")  # where it is not imported, the error is not torch's
    of_torch = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return of_torch or (isinstance(error, RuntimeError) and any(w in str(error) for w in RAN_OUT))


def release_memory(device: torch.device) -> None:
    """Free what nothing refers to any more."""
    gc.collect(1)  # what an error left is young; all generations take a second
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
