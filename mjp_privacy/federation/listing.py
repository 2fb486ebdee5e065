"""The command `mjp list`: all names that configs and commands take, each with one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated

import tyro

from mjp_privacy.core.command import DONE, Usage, print_json
from mjp_privacy.core.read import stock_configs
from mjp_privacy.core.registry import Entry, unknown_name


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
        blocks.append("\n".join([kind, *lines]))
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
    from mjp_privacy.federation.commands import ENGINES

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
    "metrics": lambda: _summaries("mjp_privacy.metrics:METRICS"),
    "settings": _settings,
    "engines": _engines,
    "configs": _configs,
}
