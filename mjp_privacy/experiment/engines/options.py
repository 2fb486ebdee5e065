"""Which engine does a run's tasks, and with what: options of a command, or a site's YAML file.

    engine:                        # site.yaml, given as --engine site.yaml
      kind: slurm
      partition: gpu
      gpus_per_task: 1

Options on the command line go before those of the file. Each worker computes with one thread, and none
of the options changes a number of the run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mjp_privacy.core.bounds import Label, Many, Text
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.fields import parse, schema
from mjp_privacy.core.gate.yaml_files import read_mapping
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.shown import shown

Kind = Literal["auto", "here", "local", "ray", "slurm"]
SUMMARIES: Mapping[Kind, str] = {
    "auto": "a process for each core or GPU of this machine, or this one for small runs; the default",
    "here": "this process alone, as for a debugger",
    "local": "several processes of this machine",
    "ray": "a Ray cluster, or Ray on this machine",
    "slurm": "jobs of a Slurm cluster",
}
KINDS: tuple[Kind, ...] = tuple(SUMMARIES)
Workers = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Minutes = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Gpus = Annotated[float, Field(strict=True, ge=0, le=1024)]
SlurmNumber = Annotated[int, Field(strict=True, ge=0, le=10**9)]
Gigabytes = Annotated[float, Field(strict=True, gt=0, le=1_000_000)]

OF_KIND: Mapping[str, tuple[str, ...]] = {
    "auto": ("workers",),
    "here": (),
    "local": ("workers",),
    "ray": ("workers", "address", "gpus_per_task"),
    "slurm": (
        "workers",
        "gpus_per_task",
        "partition",
        "account",
        "qos",
        "minutes",
        "memory_gb",
        "blocks_per_task",
        "slurm_options",
        "setup",
    ),
}
"""The options that each engine knows."""


@schema
class EngineConfig:
    """An engine and its options; None leaves a choice to the engine."""

    kind: Kind = "here"
    workers: Workers | None = None
    address: Label | None = None
    gpus_per_task: Gpus | None = None
    partition: Label | None = None
    account: Label | None = None
    qos: Label | None = None
    minutes: Minutes | None = None
    memory_gb: Gigabytes | None = None
    blocks_per_task: Workers | None = None
    slurm_options: Annotated[dict[Label, Label | SlurmNumber], Many] = field(default_factory=dict)
    """Further options of sbatch by name, such as {"constraint": "a100"}."""
    setup: Annotated[tuple[Text, ...], Many] = ()
    """Lines of shell that a task runs first, such as `module load python`."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The engine on a command line; an option that is not given is None."""

    engine: str | None = None
    """Who does the work: auto (a process for each core or GPU; the default), here (this process, as
    for a debugger), local, ray, slurm, or a site's YAML file with a section `engine`. Each works with
    one thread, and it changes no row."""
    workers: int | None = None
    """How many work at once; auto and local: as many as there are cores or GPUs."""
    address: str | None = None
    """ray: HOST:PORT of a cluster, or auto; none starts one on this machine."""
    gpus_per_task: float | None = None
    partition: str | None = None
    """slurm, as are the following."""
    account: str | None = None
    qos: str | None = None
    minutes: int | None = None
    """The time limit of a task."""
    memory_gb: float | None = None
    blocks_per_task: int | None = None
    """Blocks of images that a task does one after the other."""

    def config(self) -> EngineConfig:
        """The engine of these options."""
        return engine_config(
            self.engine or "auto", {k: v for k, v in vars(self).items() if k != "engine"}
        )


def engine_config(engine: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """The engine of a command line: --engine, a kind or a YAML file, and the options given beside.

    engine_config("local", {"workers": 2}); options that are None were not given
    """
    given = {name: value for name, value in options.items() if value is not None}
    where = "the command line"
    if engine is None or engine in KINDS:
        fields = {"kind": engine or "here", **given}
    else:
        section, where = _section(engine)
        fields = {**section, **given}
    config = parse(EngineConfig, fields, where, {})
    _refuse_idle(config, where)
    return config


def _section(engine: str) -> tuple[Mapping[str, Any], str]:
    """The section `engine` of a site's file, and what messages call it."""
    path = Path(engine)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--engine {shown(engine)}: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}, or a YAML "
            f"file with a section `engine`.{did_you_mean(engine, KINDS)}"
        )
    content = read_mapping(path)
    section = content.get("engine")
    if not isinstance(section, Mapping):
        raise UserError(
            f"{shown(path)}: expected a section `engine:` with a `kind:` in it, got "
            f"{shown(', '.join(map(str, content))) or 'an empty file'}."
        )
    return section, f"{path}, engine"


def _refuse_idle(config: EngineConfig, where: str) -> None:
    """Raise for options that this engine does not know."""
    default = EngineConfig()
    known = OF_KIND[config.kind]
    idle = [
        f.name
        for f in dataclasses.fields(EngineConfig)
        if f.name not in ("kind", *known) and getattr(config, f.name) != getattr(default, f.name)
    ]
    if idle:
        able = [kind for kind in KINDS if idle[0] in OF_KIND[kind]]
        raise UserError(
            f"{where}: `{idle[0]}` says nothing to the engine `{config.kind}`; expected "
            f"{', '.join(known) or 'no options'}. It belongs to {' or '.join(able)}."
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
