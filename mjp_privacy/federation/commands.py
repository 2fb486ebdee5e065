"""`mjp federate` and `mjp compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import DONE, Usage, use_threads
from mjp_privacy.core.errors import UserError


@dataclass(frozen=True)
class FederateArguments:
    """Train a federation and attack what its clients send; the same command again goes on."""

    config: tyro.conf.Positional[Path]
    """A file of configs/federated."""
    data: Path
    """Training images: class folders or a zip of them."""
    out: Path
    """metrics.jsonl, uploads/, model.safetensors, attack/ (an attacked run), rounds.png."""
    row: str | None = None
    """Which of the config's rows."""
    val: Path | None = None
    """Test images, to evaluate on."""
    rounds: int | None = None
    seed: int | None = None
    engine: Literal["inprocess", "flower", "flower-deployment"] = "inprocess"
    """Who runs the clients: this process, Flower's simulation, or a SuperLink with SuperNodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    """CPU threads; part of the numbers on a CPU."""


@dataclass(frozen=True)
class CompareArguments:
    """Accuracy against leakage of several federations, as a table and pictures."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The --out of each."""
    out: Path
    """table.md, comparison.csv, tradeoff.png, rounds.png, rounds.csv."""


def federate(argv: list[str], usage: Usage) -> int:
    given = usage.parse(FederateArguments, argv)
    from mjp_privacy.federation.campaign import campaign
    from mjp_privacy.federation.config import load_federation

    changes = {"rounds": given.rounds, "seed": given.seed}
    config = load_federation(given.config, given.row, **changes)
    use_threads(given.threads)
    return campaign(config, given.data, given.out, given.val, given.device, given.engine)


def compare(argv: list[str], usage: Usage) -> int:
    given = usage.parse(CompareArguments, argv)
    from mjp_privacy.federation.comparison import compare as compare_runs

    if not given.runs:
        raise UserError("Expected one federation's folder or more, got none.")
    print(compare_runs(given.runs, given.out))
    return DONE
