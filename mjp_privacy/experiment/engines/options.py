"""Which engine does a run's tasks, and with what: options of a command, or a site's YAML file.

    engine:                        # site.yaml, given as --engine site.yaml
      kind: slurm
      partition: gpu
      gpus_per_task: 1

Options on the command line go before those of the file; none changes a number of the run. Nothing
large is imported here: what is wrong with the options is said at once.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from pydantic import Field

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import free_bytes, pick_device
from mjp_privacy.core.read import read_mapping
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.schema import (
    Count,
    Label,
    Many,
    NotNegative,
    PathText,
    Positive,
    Text,
    Whole,
    parse,
    schema,
)
from mjp_privacy.core.text import shown

if TYPE_CHECKING:
    import torch

    from mjp_privacy.experiment.work import Plan

SUMMARIES: Mapping[str, str] = {
    "auto": "a process for each core or GPU here, or this one for small runs; the default",
    "here": "this process alone, as for a debugger",
    "local": "several processes of this machine",
    "ray": "a Ray cluster, or Ray on this machine",
    "slurm": "jobs of a Slurm cluster",
}
Workers = Annotated[int, Field(strict=True, ge=1, le=100_000)]
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
SMALL = 40
"""Units (an image in a cell) below which starting another process takes longer than the work."""
OF_A_WORKER = 700 << 20  # bytes that torch, timm and the metrics take in each process
COPIES = 12  # of a model's float32 weights: variants, float64, gradients of a block

SHORTEST = 5  # minutes that a Slurm task may have: it is warned 90 s before its end, and starts


@schema
class EngineConfig:
    """An engine and its options; None leaves a choice to the engine."""

    kind: Annotated[PathText, tyro.conf.arg(name="engine")] = "here"
    """Who does the work: auto (a process for each core or GPU; the default), here (this process, as
    for a debugger), local, ray, slurm, or a site's YAML file with a section `engine`. Each works
    with one thread, and it changes no row."""
    workers: Workers | None = None
    """How many work at once; auto and local: as many as there are cores or GPUs."""
    address: Label | None = None
    """ray: HOST:PORT of a cluster, or auto; none starts one on this machine."""
    gpus_per_task: NotNegative | None = None
    partition: Label | None = None
    """slurm, as are the following."""
    account: Label | None = None
    qos: Label | None = None
    minutes: Count | None = None
    """The time limit of a job."""
    memory_gb: Positive | None = None
    slurm_options: Annotated[dict[Label, Label | Whole], Many, tyro.conf.Suppress] = field(
        default_factory=dict
    )
    """Further options of sbatch by name, such as {"constraint": "a100"}."""
    setup: Annotated[tuple[Text, ...], Many, tyro.conf.Suppress] = ()
    """Lines of shell that a job runs first, such as `module load python`."""

    def given(self) -> dict[str, Any]:
        """The options that are not left to the engine, by name."""
        default, own = vars(EngineConfig(self.kind)), vars(self)
        return {name: value for name, value in own.items() if value != default[name]}


AUTO = EngineConfig("auto")
OPTIONS = [option.name for option in dataclasses.fields(EngineConfig)][1:]
OF_KIND: Mapping[str, Sequence[str]] = {
    "auto": ("workers",),
    "here": (),
    "local": ("workers",),
    "ray": ("workers", "address", "gpus_per_task"),
    "slurm": [name for name in OPTIONS if name != "address"],
}
"""The options that each engine knows."""


def engine_config(engine: EngineConfig | str | None) -> EngineConfig:
    """The engine that is meant: one of SUMMARIES, a site's YAML file, or options whose `kind` is
    either. UserError for options that the engine does not know, or where it is not to be had here.

    engine_config("local"); engine_config(EngineConfig("site.yaml", workers=2))
    """
    asked = engine if isinstance(engine, EngineConfig) else EngineConfig(engine or "here")
    fields: Mapping[str, Any] = {"kind": asked.kind}
    where, kinds = "the command line", ", ".join(SUMMARIES)
    if asked.kind not in SUMMARIES:
        path = Path(asked.kind)
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"--engine {shown(asked.kind)}: expected one of {kinds}, or a YAML file with a "
                f"section `engine`.{did_you_mean(asked.kind, SUMMARIES)}"
            )
        fields, where = read_mapping(path).get("engine", {}), f"{shown(path)}, engine"
        if not isinstance(fields, Mapping) or fields.get("kind") not in SUMMARIES:
            raise UserError(
                f"{shown(path)}: expected a section `engine:` with a `kind:` in it that is one of "
                f"{kinds}; got {shown(str(fields), 100)}."
            )
    config = parse(EngineConfig, {**fields, **asked.given()}, where)
    if idle := [name for name in config.given() if name not in OF_KIND[config.kind]]:
        able = [kind for kind in SUMMARIES if idle[0] in OF_KIND[kind]]
        raise UserError(
            f"{where}: `{idle[0]}` says nothing to the engine `{config.kind}`; expected "
            f"{', '.join(OF_KIND[config.kind]) or 'no options'}. It belongs to "
            f"{' or '.join(able)}."
        )
    _check(config)
    return config


def _check(config: EngineConfig) -> None:
    """Raise where this engine cannot do what it is asked for, or not from this machine."""
    slurm, package = config.kind == "slurm", {"ray": "ray", "slurm": "submitit"}.get(config.kind)
    if slurm and (missing := [name for name in PROGRAMS if shutil.which(name) is None]):
        raise UserError(
            f"--engine slurm: expected Slurm's commands on this machine; `{missing[0]}` is not "
            "here. Run the command on a machine from which jobs are submitted, try it on a cluster "
            "of its own with tools/slurm-here, or take --engine local."
        )
    if package and find_spec(package) is None:
        raise UserError(
            f"--engine {config.kind}: expected the package {package}, which is not installed here. "
            f"Install it: pip install 'mjp-privacy[{config.kind}]'."
        )
    if slurm and ((config.gpus_per_task or 0) % 1 or (config.minutes or SHORTEST) < SHORTEST):
        raise UserError(
            f"--engine slurm: expected whole GPUs for a job, and {SHORTEST} minutes or more, since "
            "it stops 90 seconds before its limit; got "
            f"gpus_per_task={config.gpus_per_task}, minutes={config.minutes}."
        )


def workers_here(config: EngineConfig, on_gpu: bool) -> int:
    """Workers on this machine: as given, else one for each GPU, or for each core."""
    if config.workers is not None:
        return config.workers
    return len(visible_gpus()) if on_gpu else cores()


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return tuple(part.strip() for part in named.split(","))
    return tuple(str(number) for number in range(torch.cuda.device_count()))


def devices(name: str, engine: EngineConfig) -> tuple[torch.device, torch.device]:
    """The device of this process and that of the workers, for --device auto, cpu or cuda.

    Jobs are often submitted from a machine without a GPU. With Slurm the options alone decide
    where tasks compute: auto takes GPUs if gpus_per_task asks for them. This process, which only
    looks at weights, takes its CPU.
    """
    import torch

    if engine.kind == "slurm" and name == "auto":
        name = "cuda" if engine.gpus_per_task else "cpu"
    if engine.kind == "slurm" and name == "cuda":
        return pick_device("cpu"), torch.device("cuda")
    device = pick_device(name)
    return device, device


def settled(
    config: EngineConfig, plan: Plan, largest: int, device: str
) -> tuple[EngineConfig, str]:
    """The engine that `auto` stands for, and what is said of it: a worker for each core or GPU, as
    far as there is work and memory for them; this process where that is one.

    largest  the bytes of the largest model's weights
    """
    import torch

    if config.kind not in ("auto", "local"):
        return config, ""
    on_gpu = torch.device(device).type == "cuda"
    wanted = workers_here(config, on_gpu)
    tasks = sum(len(blocks) * len(plan.groups(name)) for name, blocks in plan.blocks.items())
    number, remark = min(wanted, max(1, tasks)), ""
    free = free_bytes(torch.device("cpu"))
    if config.workers is None and free is not None and not on_gpu:
        each = OF_A_WORKER + COPIES * largest
        if (fit := max(1, free // each)) < number:
            remark = (
                f"memory holds {fit} of {number} workers ({free / 2**30:.1f} GiB free, about "
                f"{each / 2**30:.1f} GiB each): {fit} start; --workers asks for another number"
            )
            number = fit
    small = config.workers is None and plan.units < SMALL
    if config.kind == "auto" and (number == 1 or small):
        return EngineConfig("here"), remark
    return dataclasses.replace(config, kind="local", workers=number), remark
