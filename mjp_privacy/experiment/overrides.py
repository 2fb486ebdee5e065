"""What is changed in an experiment before its cells are made: by the command line, and by
conditions in its grid (`decided`), whose models' headers are read for it.

    only_with: unknown_embedding   leaves out models that cannot mask
    trained_gamma: true            takes the shuffle ratio that a model was trained with
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import find_attack
from mjp_privacy.client.config import ClientConfig, client_identity
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.core.text import plain
from mjp_privacy.experiment.config import (
    AttackConfig,
    Experiment,
    GridEntry,
    attacks_of,
    client_fields,
)

if TYPE_CHECKING:
    from mjp_privacy.models import LoadedModel


def with_changes(
    experiment: Experiment,
    *,
    weights: Sequence[str] = (),
    gamma: float | None = None,
    model: Mapping[str, Any] | None = None,
    attack_seconds: float | None = None,
) -> Experiment:
    """The experiment with everything that a command line changes; None and () change nothing."""
    changed = with_model_fields(experiment, model or {})
    if gamma is not None:
        changed = with_gamma(changed, gamma)
    changed = dataclasses.replace(changed, attacks=with_seconds(changed.attacks, attack_seconds))
    return with_weights(changed, weights)


def with_seconds(
    attacks: Sequence[AttackConfig], seconds: float | None
) -> tuple[AttackConfig, ...]:
    """The attacks with this much time for each image; None changes nothing."""
    if seconds is None:
        return tuple(attacks)
    return tuple(dataclasses.replace(attack, seconds=seconds) for attack in attacks)


def with_published_attacks(experiment: Experiment) -> Experiment:
    """The experiment with those of its attacks alone that the paper ran, without its controls.

    Grid entries that are left without an attack go.
    """
    attacks = tuple(
        attack
        for attack in experiment.attacks
        if getattr(find_attack(attack.name, dict(attack.options)), "published", False)
    )
    grid = tuple(
        dataclasses.replace(entry, attacks=kept)
        for entry in experiment.grid
        if (kept := tuple(a.title for a in attacks_of(entry, experiment) if a in attacks))
    )
    if not attacks or (experiment.grid and not grid):
        raise UserError(
            f"--published-only: {experiment.name!r} has no attack that the paper ran; expected "
            "april among its attacks. Run it without --published-only, or take table5."
        )
    return dataclasses.replace(experiment, attacks=attacks, grid=grid)


def with_only(experiment: Experiment, texts: Sequence[str]) -> Experiment:
    """The experiment with those of its models alone whose names hold one of these texts; () changes
    nothing.

    with_only(load_experiment("atlas_grid"), ["DINOv3", "clip"])
    """
    names = [name for name in experiment.models if any(t.lower() in name.lower() for t in texts)]
    for text in texts:
        if not any(text.lower() in name.lower() for name in names):
            unknown = unknown_name("model", text, list(experiment.models))
            raise UserError(f"--only: expected a part of a model's name. {unknown}")
    if not texts:
        return experiment
    grid = tuple(
        dataclasses.replace(entry, models=kept)
        for entry in experiment.grid
        if (kept := tuple(model for model in entry.models if model in names))
    )
    models = {name: experiment.models[name] for name in names}
    return dataclasses.replace(experiment, models=models, grid=grid)


def with_gamma(experiment: Experiment, gamma: float) -> Experiment:
    """The experiment with this shuffle ratio in settings b and c; cells that become equal are kept
    once. The new grid has an entry for each cell, in the order of the table."""
    if not 0.0 <= gamma <= 1.0:
        raise UserError(f"--gamma is a share of the patches, 0 to 1; got {gamma}.")
    from mjp_privacy.client.feeding import SETTINGS

    settings = {setting for entry in experiment.grid for setting in entry.settings}
    if not any(SETTINGS[setting].shuffles for setting in settings):
        raise UserError(
            f"--gamma would change nothing: {experiment.name!r} shuffles no picture. Leave it out."
        )
    grid: list[GridEntry] = []
    seen: set[tuple[str, ...]] = set()
    for entry in experiment.grid:
        titles = dict.fromkeys(attack.title for attack in attacks_of(entry, experiment))
        client = json.dumps(client_identity(ClientConfig(**client_fields(entry, experiment))))
        dtypes = entry.dtypes or experiment.dtypes
        for line in product(entry.models, entry.settings, titles, dtypes):
            if (*line, client) not in seen:
                seen.add((*line, client))
                model, setting, title, dtype = line
                alone: dict[str, Any] = {
                    **{"models": (model,), "settings": (setting,), "gammas": (gamma,)},
                    **{"attacks": (title,), "dtypes": (dtype,), "trained_gamma": False},
                }
                grid.append(dataclasses.replace(entry, **alone))
    return dataclasses.replace(experiment, grid=tuple(grid))


def with_weights(experiment: Experiment, weights: Sequence[str]) -> Experiment:
    """The experiment with these checkpoints: `NAME=PATH` for one model, `PATH` for all others.
    NAME and PATH may contain '='.

    with_weights(experiment, ("all.pth", "MJP=mjp.pth")), in any order
    """
    models = experiment.models
    paths: dict[str | None, str] = {}  # None: of all models that are not named
    for item in weights:
        name = max((n for n in models if item.startswith(f"{n}=")), key=len, default=None)
        if name is None and "=" in item and not Path(item).exists():
            unknown = unknown_name("model", item.partition("=")[0], list(models))
            raise UserError(f"--weights {item}: not a file, and read as NAME=PATH: {unknown}")
        path = item if name is None else item.removeprefix(f"{name}=")
        if not path or name in paths:
            came = "two" if name in paths else "none"
            raise UserError(
                f"--weights: expected one checkpoint for {name or 'all models'}, got {came}. "
                "Write PATH, or NAME=PATH, once for each model."
            )
        paths[name] = path
    replaced = {}
    for label, config in models.items():
        checkpoint = paths.get(label) or paths.get(None) or config.checkpoint
        replaced[label] = dataclasses.replace(config, checkpoint=checkpoint)
    return dataclasses.replace(experiment, models=replaced)


def with_model_fields(experiment: Experiment, fields: Mapping[str, Any]) -> Experiment:
    """The experiment with these fields in all of its models: `--model`, `--img-size` and the like.

    with_model_fields(experiment, {"model": "vit_small_patch16_224", "mean": (0.5,)}); None and an
    empty tuple change nothing, one number stands for all channels.
    """
    given = {name: value for name, value in fields.items() if value not in (None, ())}
    for name in {"mean", "std"} & set(given):
        numbers = tuple(given[name])
        if len(numbers) not in (1, 3):
            listed = " ".join(f"{number:g}" for number in numbers)
            raise UserError(
                f"--{name}: expected one number or three, one per channel; got {listed}."
            )
        given[name] = numbers[0] if len(numbers) == 1 else numbers
    models = {
        label: dataclasses.replace(config, **given) for label, config in experiment.models.items()
    }
    return dataclasses.replace(experiment, models=models)


def unreached(before: Experiment, changed: Experiment) -> list[str]:
    """A note for each field that the command line changed, such as `client.batch`, and that some
    entries of the grid do not take because they set their own value: nobody shall take a figure of
    batch 1 for one of batch 4. Raises where no entry takes it.

    unreached(load_experiment("batches"), experiment with other fields of its own)
    """
    known: dict[str, tuple[Any, Any, list[Any]]] = {
        "dtypes": (before.dtypes, changed.dtypes, [entry.dtypes for entry in changed.grid])
    }
    for name in (f.name for f in dataclasses.fields(ClientConfig)):
        own = [(entry.client or {}).get(name) for entry in changed.grid]
        old, new = getattr(before.client, name), getattr(changed.client, name)
        known[f"client.{name}"] = old, new, [tuple(v) if isinstance(v, list) else v for v in own]
    notes = []
    for name, (old, new, own) in known.items():
        values = [value for value in own if value not in (None, new)]
        if old == new or not values:
            continue
        listed = plain(", ".join(dict.fromkeys(str(v) if v != () else "none" for v in values)))
        if len(values) == len(own):
            raise UserError(
                f"--{name} would change nothing: expected an entry in the grid of {changed.name} "
                f"without its own {name}, but they say {listed}. Leave the option out, or change "
                "a copy of the config."
            )
        notes.append(
            f"note: --{name} does not reach {len(values)} of the grid's {len(own)} entries, which "
            f"say {listed}"
        )
    return notes


def check_models(experiment: Experiment, where: str) -> None:
    """Raise for a model or weights of a name that does not exist."""
    from mjp_privacy.models.loading import check_names

    for label, config in experiment.models.items():
        try:
            check_names(config.model, config.checkpoint)
        except UserError as error:
            raise UserError(f"{where}, models.{label}: {error}") from error


# conditions ---------------------------------------------------------------------------------------


def decided(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment without conditions, and a sentence for each thing that they decided.

    A model that a condition depends on and that cannot be read is a UserError.
    """
    from mjp_privacy.models.loading import outline_model

    outlines: dict[str, LoadedModel] = {}
    grid: list[GridEntry] = []
    left_out: dict[str, list[str]] = {}  # attacks that are left out, by model
    remarks: dict[str, None] = {}  # an ordered set
    for entry in experiment.grid:
        if entry.only_with is None and not entry.trained_gamma:
            grid.append(entry)
            continue
        for model in entry.models:
            if model not in outlines:
                config = experiment.models[model]
                outlines[model] = outline_model(config.model, whole=True, **config.loading())
            outline = outlines[model]
            if entry.only_with == "unknown_embedding" and outline.unk_embed is None:
                titles = [attack.title for attack in attacks_of(entry, experiment)]
                left_out.setdefault(model, []).extend(titles)
                continue
            alone = dataclasses.replace(entry, models=(model,), only_with=None, trained_gamma=False)
            trained = outline.card.trained_gamma
            if entry.trained_gamma and trained:
                alone = dataclasses.replace(alone, gammas=(trained,))
                remark = f"{model}: gamma {trained:g}, as it was trained; --gamma replaces it"
                remarks[remark] = None
            grid.append(alone)
    for model, titles in left_out.items():
        kept = {a.title for e in grid if model in e.models for a in attacks_of(e, experiment)}
        gone = ", ".join(title for title in dict.fromkeys(titles) if title not in kept)
        remarks[
            f"{model}: no unknown embedding (E_unk), so it cannot mask and its lines under MJP are "
            f"left out ({gone or 'of attacks that run without it'}); configs/ladder_vit.yaml runs "
            "a plain model as an MJP client"
        ] = None
    if not grid:
        raise UserError(
            f"Nothing is left of the grid of {experiment.name!r}: {'; '.join(remarks)}. Expected a "
            "model that has what the grid's `only_with` asks for."
        )
    return dataclasses.replace(experiment, grid=tuple(grid)), tuple(remarks)
