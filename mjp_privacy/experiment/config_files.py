"""Reads and checks the config of an experiment; a misspelt name gets the nearest real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks import ATTACKS, CONTROLS, find_attack
from attacks.prior.names import check_prior
from mjp_privacy.client.config import ClientConfig, check_client
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping
from mjp_privacy.core.registry import did_you_mean, unknown_name
from mjp_privacy.core.schema import parse
from mjp_privacy.experiment.config import (
    MOST_CELLS,
    AttackConfig,
    Experiment,
    GridEntry,
    ModelConfig,
    client_fields,
)

STOCK = Path(__file__).resolve().parents[2] / "configs"
SUFFIXES = (".yaml", ".yml")
OF_A_RUN = {"experiment", "made_with"}
"""Fields of the experiment.yaml in a run's folder."""

_OWNERS: dict[str, Any] = {
    "models": ModelConfig,
    "grid": GridEntry,
    "attacks": AttackConfig,
    "client": ClientConfig,
}
"""The dataclasses behind the nested fields of an experiment."""


def load_experiment(config: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    """An experiment from a YAML file, a mapping or an Experiment, checked in each case.

    load_experiment("configs/demo.yaml"); load_experiment("demo"), a stock config by its name;
    load_experiment("results/demo/experiment.yaml"), what a run wrote of itself
    """
    if isinstance(config, Experiment):
        check_experiment(config, "the experiment")
        return config
    if isinstance(config, Mapping):
        return parse_experiment(config, "the config")
    path = find_config(config)
    content = read_mapping(path)
    if content.keys() == OF_A_RUN and isinstance(content["experiment"], dict):
        content = content["experiment"]
    return parse_experiment(content, str(path))


def find_config(config: str | Path) -> Path:
    """The file of a config that is given by its path or, from anywhere, by a stock config's name.

    find_config("demo"): a file of this name, else configs/demo.yaml here or beside the package
    """
    path = Path(config)
    if path.is_file() or path.is_dir() or len(path.parts) != 1 or path.suffix in SUFFIXES:
        return path
    folders = (Path("configs"), STOCK)
    if file := next((f for f in (at / f"{path}.yaml" for at in folders) if f.is_file()), None):
        return file
    names = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    raise UserError(
        f"No config {str(path)!r}: expected a YAML file, or the name of a stock config."
        f"{did_you_mean(str(path), names)} Stock configs: {', '.join(names) or 'none'}."
    )


def parse_experiment(content: Mapping[str, Any], where: str) -> Experiment:
    """An experiment from its fields, checked; `where` names the file in error messages."""
    experiment = parse(Experiment, content, where, _OWNERS)
    check_experiment(experiment, where)
    return experiment


def check_experiment(experiment: Experiment, where: str) -> None:
    """Raise if a name does not exist, a list is empty or fields contradict each other."""
    for field in ("grid", "dtypes", "attacks"):
        if not getattr(experiment, field) and (field != "grid" or experiment.models):
            raise UserError(f"{where}, {field}: expected at least one entry, got none.")
    _check_labels(experiment.attacks, where)
    _check_names(experiment.attacks, where)
    check_client(experiment.client, experiment.block, f"{where}, client")
    for place, entry in enumerate(experiment.grid):
        _check_entry(entry, experiment, f"{where}, grid.{place}")
    _check_size(experiment, where)


def _check_size(experiment: Experiment, where: str) -> None:
    """Raise for a grid whose lists multiply to more lines than anybody reads."""
    cells = sum(
        len(entry.models)
        * len(entry.settings)
        * len(entry.gammas)
        * len(experiment.attacks if entry.attacks is None else entry.attacks)
        * len(experiment.dtypes)
        for entry in experiment.grid
    )
    if cells > MOST_CELLS:
        raise UserError(
            f"{where}, grid: expected at most {MOST_CELLS} cells, got {cells}: models × settings × "
            "gammas × attacks × dtypes. Shorten the lists, or make several configs."
        )


def check_attacks(attacks: Sequence[AttackConfig], where: str) -> None:
    """Raise for attacks that cannot be made: a name or an option that does not exist, a value out
    of range, code of one's own that cannot be imported, a prior that cannot be read.

    It imports them, so it comes when a command is about to do its work, and before any of it.
    """
    _check_labels(tuple(attacks), where)
    _check_names(tuple(attacks), where)
    for place, attack in enumerate(attacks):
        try:
            prior = getattr(find_attack(attack.name, attack.options), "prior", None)
            if isinstance(prior, str):
                check_prior(prior)
        except UserError as error:
            raise UserError(f"{where}, attacks.{place}: {error}") from error


def _check_labels(attacks: tuple[AttackConfig, ...], where: str) -> None:
    """Raise if two attacks have one label.

    Attacks without labels may share a name: they are then told apart by their engines.
    """
    for attack in attacks:
        same = [candidate for candidate in attacks if candidate.title == attack.title]
        if len(same) > 1 and any(candidate.label for candidate in same):
            raise UserError(
                f"{where}, attacks: expected labels that differ, got {attack.title!r} "
                f"{len(same)} times. Give each attack its own label."
            )


def _check_names(attacks: tuple[AttackConfig, ...], where: str) -> None:
    """Raise for an attack that does not exist.

    This must come before the grid is checked: a misspelt name would make a correct one in the grid
    look wrong.
    """
    registered = [*ATTACKS, *CONTROLS]
    for place, attack in enumerate(attacks):
        if attack.name not in registered:
            raise UserError(
                f"{where}, attacks.{place}: {unknown_name('attack', attack.name, registered)}"
            )


def _check_entry(entry: GridEntry, experiment: Experiment, where: str) -> None:
    labels = [attack.title for attack in experiment.attacks]
    for field in ("models", "settings", "gammas", "attacks", "dtypes"):
        values = getattr(entry, field)
        if values is not None and not values:
            raise UserError(f"{where}.{field}: expected at least one entry, got none.")
    for model in entry.models:
        if model not in experiment.models:
            raise UserError(f"{where}: {unknown_name('model', model, list(experiment.models))}")
    for attack in entry.attacks or ():
        if attack not in labels:
            raise UserError(f"{where}: {unknown_name('attack', attack, labels)}")
    client = experiment.client
    if entry.client is not None:
        client = _client_of(entry, experiment, where)
        check_client(client, experiment.block, f"{where}.client")
    _check_precision(client, entry.dtypes or experiment.dtypes, where)


def _check_precision(client: ClientConfig, dtypes: Sequence[str], where: str) -> None:
    """Raise for half precision beside float64, which autocast leaves as it is."""
    if client.autocast != "none" and "float64" in dtypes:
        raise UserError(
            f"{where}: expected dtypes: [float32] with client.autocast: {client.autocast}, got "
            f"[{', '.join(dtypes)}]: torch.autocast leaves float64 as it is, so nothing would be "
            "rounded. Set dtypes: [float32] for this entry, or autocast: none."
        )


def _client_of(entry: GridEntry, experiment: Experiment, where: str) -> ClientConfig:
    return parse(ClientConfig, client_fields(entry, experiment), f"{where}.client", {})
