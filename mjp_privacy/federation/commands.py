"""The commands `mjp federate` and `mjp compare`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mjp_privacy.core.command import DONE, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import use_threads
from mjp_privacy.experiment.engines.options import AUTO, EngineConfig


@dataclass(frozen=True)
class FederateArguments:
    """Train a federation and attack what its clients send.

    If it was stopped, the same command goes on from where it was.
    """

    config: tyro.conf.Positional[Path]
    """A YAML file such as those in configs/federated."""
    data: Path
    """Training images: class folders, a zip of them, or `embedded`: photographs that every
    installation has, each a class."""
    out: Path
    """Folder for metrics.jsonl, uploads/, model.safetensors, attack/ (an attacked run) and
    rounds.png."""
    row: str | None = None
    """One of the config's named rows."""
    val: Path | None = None
    """Test images to evaluate on."""
    rounds: int | None = None
    """Number of rounds, in place of the config's; recorded rounds, warm-up and evaluations move in
    proportion."""
    seed: int | None = None
    """Seed of all random choices, in place of the config's."""
    engine: Literal["inprocess", "flower", "flower-deployment"] = "inprocess"
    """Who runs the clients: this process, Flower's simulation, or a SuperLink with SuperNodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    """CPU threads; on a CPU, results change slightly with their number."""
    attack_seconds: float | None = None
    """The processor's time that an attack may take over one image, in place of the config's."""
    fresh: bool = False
    """Make results again that an earlier version of their attack made; without this or --keep the
    command stops where it finds any."""
    keep: bool = False
    """Keep such results and attack what is missing."""
    attack: Annotated[EngineConfig, tyro.conf.arg(name="attack")] = AUTO
    """Who attacks what was recorded."""


@dataclass(frozen=True)
class CompareArguments:
    """Accuracy against leakage of several federations, as a table and pictures."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The --out folders of `mjp federate`."""
    out: Path
    """Folder for table.md, comparison.csv, tradeoff.png, rounds.png and rounds.csv."""


def federate(argv: list[str], usage: Usage) -> int:
    """`mjp federate`: train a federation, then attack its recorded uploads; the exit code."""
    arguments = usage.parse(FederateArguments, argv)
    from mjp_privacy.experiment.code import stale_choice
    from mjp_privacy.experiment.config import check_attacks
    from mjp_privacy.experiment.engines.options import engine_config
    from mjp_privacy.experiment.overrides import with_seconds
    from mjp_privacy.federation.campaign import campaign
    from mjp_privacy.federation.config import load_federation, what_moved, with_rounds

    stale = stale_choice(arguments.fresh, arguments.keep)
    by = engine_config(arguments.attack)  # a mistake in it is told before the training
    whole = load_federation(arguments.config, arguments.row, seed=arguments.seed)
    config = whole if arguments.rounds is None else with_rounds(whole, arguments.rounds)
    if moved := what_moved(whole, config):
        print(moved)
    config = replace(config, attacks=with_seconds(config.attacks, arguments.attack_seconds))
    check_attacks(config.attacks, str(arguments.config))
    use_threads(arguments.threads)
    return campaign(
        config,
        arguments.data,
        arguments.out,
        arguments.val,
        arguments.device,
        arguments.engine,
        stale,
        by,
    )


def compare(argv: list[str], usage: Usage) -> int:
    """`mjp compare`: set finished federations beside each other; the exit code."""
    arguments = usage.parse(CompareArguments, argv)
    from mjp_privacy.federation.comparison import compare as compare_runs

    if not arguments.runs:
        raise UserError(
            "Expected the --out folders of one or more `mjp federate` runs, got none. Name them."
        )
    print(compare_runs(arguments.runs, arguments.out))
    return DONE
