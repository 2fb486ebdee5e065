"""The commands `mjp federate`, from images to a picture of leakage, and `mjp compare`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mjp_privacy.core.command import DONE, SOME_FAILED, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, working_in
from mjp_privacy.core.machine import use_threads
from mjp_privacy.core.read import is_there
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.text import shown
from mjp_privacy.data.opening import keep_apart
from mjp_privacy.experiment.engines.options import AUTO, EngineConfig, engine_config


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


_FLOWER = "mjp_privacy.federation.flower.run:run_flower"
ENGINES: Mapping[str, Entry] = {
    "inprocess": Entry("mjp_privacy.federation.rounds:federate", "this process, round by round"),
    "flower": Entry(_FLOWER, "Flower's simulation, on Ray", {"engine": "flower"}),
    "flower-deployment": Entry(
        _FLOWER, "a Flower SuperLink with SuperNodes", {"engine": "flower-deployment"}
    ),
}


def federate(argv: list[str], usage: Usage) -> int:
    """`mjp federate`: train a federation, attack its recorded uploads and draw the leakage; 0, or 3
    if some image or cell failed."""
    arguments = usage.parse(FederateArguments, argv)
    from mjp_privacy.experiment.code import stale_choice
    from mjp_privacy.experiment.config import Experiment, check_attacks
    from mjp_privacy.experiment.overrides import with_seconds
    from mjp_privacy.experiment.run import attack_uploads
    from mjp_privacy.federation.config import load_federation, with_rounds
    from mjp_privacy.federation.rounds import ATTACK, UPLOADS

    stale, by = stale_choice(arguments.fresh, arguments.keep), engine_config(arguments.attack)
    config = load_federation(arguments.config, arguments.row, seed=arguments.seed)
    if arguments.rounds is not None:
        config = with_rounds(config, arguments.rounds)
    config = replace(config, attacks=with_seconds(config.attacks, arguments.attack_seconds))
    out, device = arguments.out, arguments.device
    attacked = out / ATTACK
    # what would stop the attacks after hours of training; they are no part of what is trained, and
    # after a correction the same folder goes on
    keep_apart(out, {"--data": arguments.data, "--val": arguments.val})
    check_attacks(config.attacks, str(arguments.config))
    output_folder(out)
    if is_there(attacked) and not attacked.is_dir():
        raise UserError(
            f"{shown(attacked)}: expected a folder for the attacks, or nothing; got a file. "
            "Give another --out, or move it away."
        )
    use_threads(arguments.threads)
    with working_in(out):  # from the first round to the picture
        entry = ENGINES[arguments.engine]
        trained = entry.load()
        print(
            trained(config, arguments.data, out, val=arguments.val, device=device, **entry.preset)
        )
        if not config.attacks or not config.record.rounds:
            return DONE
        experiment = Experiment(config.name, attacks=config.attacks, seed=config.seed)
        summary = attack_uploads(
            experiment, out / UPLOADS, attacked, device=device, stale=stale, engine=by
        )
        if summary.not_done:
            print("Not attacked, and nothing drawn; the same command goes on:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in summary.not_done), file=sys.stderr)
            return SOME_FAILED
        from mjp_privacy.federation.comparison import draw_rounds, leakage_table

        print(draw_rounds([out], leakage_table([out]), out))
        print(f"Next: mjp report {attacked}")
        return DONE if summary.exit_code == 0 else SOME_FAILED


def compare(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(CompareArguments, argv)
    from mjp_privacy.federation.comparison import compare as compare_runs

    print(compare_runs(arguments.runs, arguments.out))
    return DONE
