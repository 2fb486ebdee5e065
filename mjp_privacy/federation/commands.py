"""python -m mjp_privacy.clients CONFIG --data PATH --out DIR; also `check` and `compare`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mjp_privacy.core.command import kindly
from mjp_privacy.core.errors import UserError


@dataclass(frozen=True)
class FederateArguments:
    """Train a federation and attack what its clients send; the same command again goes on.

    `python -m mjp_privacy.clients check DIR` says what recorded uploads are good for, and
    `python -m mjp_privacy.clients compare RUN ... --out DIR` puts federations beside each other.
    """

    config: tyro.conf.Positional[Path]
    """A file of configs/federated."""
    data: Path
    """Training images: class folders or a zip of them."""
    out: Path
    """metrics.jsonl, uploads/, model.safetensors, attack/ (a run of run_attack.py), rounds.png."""
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
class CheckArguments:
    """Which attacks apply to recorded uploads, and what is wrong with them."""

    folder: tyro.conf.Positional[Path]
    """NAME.safetensors and NAME.json for each upload, weights/ beside them."""


@dataclass(frozen=True)
class CompareArguments:
    """Accuracy against leakage of several federations, as a table and pictures."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The --out of each."""
    out: Path
    """table.md, comparison.csv, tradeoff.png, rounds.png, rounds.csv."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    commands = {"check": _check, "compare": _compare}
    if given and given[0] in commands:
        return kindly(commands[given[0]], given[1:])
    return kindly(_federate, given)


def _check(argv: list[str]) -> int:
    arguments = tyro.cli(CheckArguments, args=argv, prog="mjp_privacy.clients check")
    from mjp_privacy.experiment.check import check_uploads

    text, code = check_uploads(arguments.folder)
    print(text)
    return code


def _compare(argv: list[str]) -> int:
    arguments = tyro.cli(CompareArguments, args=argv, prog="mjp_privacy.clients compare")
    from mjp_privacy.federation.comparison import compare

    if not arguments.runs:
        raise UserError("Expected one federation's folder or more, got none.")
    print(compare(arguments.runs, arguments.out))
    return 0


def _federate(argv: list[str]) -> int:
    given = tyro.cli(FederateArguments, args=argv, prog="mjp_privacy.clients")
    import torch

    from mjp_privacy.federation.campaign import campaign
    from mjp_privacy.federation.config import load_federation

    changes = {"rounds": given.rounds, "seed": given.seed}
    config = load_federation(given.config, given.row, **changes)
    if given.threads is not None and given.threads < 1:
        raise UserError(f"--threads: expected 1 or more, got {given.threads}.")
    if given.threads:
        torch.set_num_threads(given.threads)
    return campaign(config, given.data, given.out, given.val, given.device, given.engine)


if __name__ == "__main__":
    sys.exit(main())
