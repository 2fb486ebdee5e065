"""The commands `mjp federate`, from images to a picture of leakage, and `mjp compare`; and
`mjp list`, which names what all rooms below have."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mjp_privacy.core.command import DONE, SOME_FAILED, Usage, check_idle, print_json
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import output_folder, working_in
from mjp_privacy.core.machine import use_threads
from mjp_privacy.core.read import STOCK, is_there, stock_configs
from mjp_privacy.core.registry import Entry, unknown_name
from mjp_privacy.core.text import shown
from mjp_privacy.data.images import keep_apart
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
    """Folder for table.md, comparison.csv, tradeoff.png, rounds.png and rounds.csv: a new or empty
    one, or that of an earlier comparison."""


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
    from mjp_privacy.federation.config import load_federation
    from mjp_privacy.federation.rounds import ATTACK, UPLOADS
    from mjp_privacy.training.run_files import check_command

    stale, by = stale_choice(arguments.fresh, arguments.keep), engine_config(arguments.attack)
    config = load_federation(arguments.config, arguments.row, seed=arguments.seed)
    if not config.attacks:
        of_attacks = ("attack_seconds", "fresh", "keep", "attack")
        check_idle(arguments, of_attacks, f"{arguments.config} has no attacks")
    config = replace(config, attacks=with_seconds(config.attacks, arguments.attack_seconds))
    out, device = arguments.out, arguments.device
    attacked = out / ATTACK
    # what would stop the attacks after hours of training; they are no part of what is trained, and
    # after a correction the same folder goes on
    keep_apart(out, {"--data": arguments.data, "--val": arguments.val})
    check_attacks(config.attacks, str(arguments.config))
    check_command(output_folder(out), "federate")
    if is_there(attacked) and not attacked.is_dir():
        raise UserError(
            f"{shown(attacked)}: expected a folder for the attacks, or nothing; got a file. "
            "Give another --out, or move it away."
        )
    use_threads(arguments.threads)
    if arguments.threads is not None:  # Flower's processes, too
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
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


# `mjp list` ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListArguments:
    """The names that configs and commands take, each with one line."""

    kind: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[KIND]")] = None
    """models, attacks, defenses, metrics, settings, engines or configs; all if left out."""
    json: bool = False
    """Print JSON for programs (docs/json.md): {kind: {name: line}}."""


def list_names(argv: list[str], usage: Usage) -> int:
    arguments = usage.parse(ListArguments, argv)
    if arguments.kind is not None and arguments.kind not in NAMES:
        raise unknown_name("kind of names", arguments.kind, NAMES)
    kinds = list(NAMES) if arguments.kind is None else [arguments.kind]
    listed = {kind: dict(NAMES[kind]()) for kind in kinds}
    if arguments.json:
        print_json("list", listed)
        return DONE
    width = max(len(name) for names in listed.values() for name in names) + 2
    blocks = []
    for kind, names in listed.items():
        lines = [f"  {name:{width}}{line}".rstrip() for name, line in names.items()]
        where = f" ({STOCK.parent}/…)" if kind == "configs" else ""
        blocks.append("\n".join([kind + where, *lines]))
    print("\n\n".join(blocks))
    return DONE


def _summaries(*places: str) -> dict[str, str]:
    """The names of registries, each with its entry's line."""
    books = [Entry(place).load() for place in places]
    return {name: book[name].summary for book in books for name in book}


def _defenses() -> Mapping[str, str]:
    from mjp_privacy.client.defenses.registry import DEFENSES, defense_class

    docs = {name: defense_class(name).__doc__ or "" for name in DEFENSES}
    return {name: doc.strip().splitlines()[0].rstrip(".") for name, doc in docs.items()}


def _settings() -> Mapping[str, str]:
    from mjp_privacy.client.feeding import SETTINGS

    fed = {False: "plain image fed", True: "shuffled image fed"}
    against = {"plain": "scored against the plain image", "input": "scored against what was fed"}
    return {
        name: f"{fed[SETTINGS[name].shuffles]}, {against[SETTINGS[name].against]}"
        for name in SETTINGS
    }


def _engines() -> Mapping[str, str]:
    from mjp_privacy.experiment.engines.options import SUMMARIES

    attacking = {name: f"mjp attack --engine: {line}" for name, line in SUMMARIES.items()}
    training = {name: f"mjp federate --engine: {ENGINES[name].summary}" for name in ENGINES}
    return attacking | training


def _configs() -> Mapping[str, str]:
    """The stock configs, each with the first sentence of the comment that it opens with."""
    found = {}
    for name, file in stock_configs().items():
        text = file.read_text(encoding="utf-8").splitlines()
        lines = takewhile(lambda line: line.startswith("# "), text)
        found[name] = " ".join(line.lstrip("# ") for line in lines).split(". ")[0].rstrip(".:")
    return found


MORE_MODELS = {
    "vit_tiny_patch16_224, ...": "timm's ViTs by their names; `.TAG` names weights",
    "vit_small_patch14_dinov2, ...": "timm's other ViTs: DINOv2, DINOv3, DeiT-III, SigLIP, ...",
    "--weights hf-hub:ORG/MODEL": "of the hub, or a folder with timm's config.json",
}
NAMES: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "models": lambda: _summaries("mjp_privacy.models.zoo:NAMED_MODELS") | MORE_MODELS,
    "attacks": lambda: _summaries("attacks:ATTACKS", "attacks:CONTROLS"),
    "defenses": _defenses,
    "metrics": lambda: _summaries("mjp_privacy.metrics.scores:METRICS"),
    "settings": _settings,
    "engines": _engines,
    "configs": _configs,
}
