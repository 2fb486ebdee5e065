"""`save_upload`: a user's own gradients as a recorded upload for `mjp attack --uploads`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mjp_privacy.client.autocast import Autocast
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.header import UploadHeader, check_header
from mjp_privacy.client.recorded.loading import UNKNOWN_LABEL
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import MOST_COUNT
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from mjp_privacy.models import LoadedModel
from mjp_privacy.own.attacking import Images, images_given
from mjp_privacy.own.client import ClientStep, Kind, is_number, is_whole, said
from mjp_privacy.own.labels import Labels
from mjp_privacy.own.private_images import private_images
from mjp_privacy.own.reading import Held, separate_uploads
from mjp_privacy.own.uploads import Channels, own_uploads

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def save_upload(
    folder: str | Path,
    model: nn.Module,
    gradients: Held = None,
    *,
    name: str = "upload",
    label: str | None = None,
    mean: Channels = None,
    std: Channels = None,
    labels: Labels | None = None,
    images: Images | None = None,
    round: int = 0,
    series: str | None = None,
    gamma: float = 0.0,
    recipe: Mapping[str, Any] | None = None,
    kind: Kind = "gradient",
    batch: int | None = None,
    lr: float | None = None,
    steps: int = 1,
    optimizer: str = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    noise: float = 0.0,
    rounding: float = 0.0,
    autocast: Autocast = "none",
) -> Path:
    """Write one upload and the weights it was made with into a folder; the path of its tensors.

    save_upload("uploads", model, gradients, name="round_3", mean=0.5, std=0.5)
    then: mjp check uploads; mjp attack uploads --uploads uploads --out results/uploads

    name    of the upload's files; uploads of one folder have different names
    label   what tables call the client and its model; None: the folder's name
    images  the private images (B, 3, S, S) in [0, 1], for scoring; may be absent. They are written
            to FOLDER/truth: leave that out when you pass the folder on
    labels  recorded only if given; else the attacker reads them off the gradient, as here
    series  uploads with the same series name hold the same images, for attacks on several
    gamma, recipe  MJP's ratio, and other fields of a client as the attack's configs have them
    All else as in `attack_gradients`.
    """
    if not isinstance(folder, str | Path) or "\0" in str(folder) or not str(folder).strip():
        raise UserError(f"folder: expected the path of a folder, got {said(folder)}.")
    _check_free(Path(folder), name)
    if len(separate_uploads(gradients)) > 1:
        raise UserError(
            "save_upload writes one upload; got a list of several. Call it once for each, with a "
            "name of its own and the same series=…."
        )
    client = ClientStep(
        kind,
        1 if batch is None else batch,
        lr,
        steps,
        optimizer,
        momentum,
        weight_decay,
        0.0,
        noise,
        rounding,
        autocast,
    )
    count = images_given(labels, images) if batch is None else None
    own = own_uploads(model, gradients, client, labels=labels, mean=mean, std=std, images=count)
    loaded, update = own.models[0], own.updates[0]
    batch = update.batch
    _check_one_upload(loaded, update)
    _check_words(gamma, round, recipe)
    plain = None
    if images is not None:
        plain = private_images(images, batch, loaded.card.img_size).float()
    root = UploadFolder(Path(folder))
    given = own.labels if own.label_source == "given" else None
    header = UploadHeader(
        label=Path(folder).resolve().name if label is None else label,
        weights="not stored yet",
        mean=_three(loaded.card.mean),
        std=_three(loaded.card.std),
        gamma=gamma,
        series=series,
        recipe=dict(recipe or {}),
        labels=None if given is None else tuple(given.tolist()),
        round=round,
        kind=kind,
        batch=batch,
        lr=lr,
        steps=steps,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
    )
    check_header(header, Path(folder) / f"{name}.json")  # as whoever reads it will
    header = replace(header, weights=root.record_weights(loaded))
    paths = root.record(
        replace(update, round=round),
        header,
        [name],
        inputs=None if plain is None else _inputs(plain, given, series or name),
        plain=plain,
        series=None if series is None else [series],
    )
    return paths[0]


def _check_one_upload(loaded: LoadedModel, update: ClientUpdate) -> None:
    """Raise unless this is one upload of a model that recorded uploads are attacked with."""
    steps_sent = len(next(iter(update.grads.values())))
    if steps_sent != 1:
        raise UserError(
            f"save_upload writes one upload; the gradients hold {steps_sent} independent steps. "
            "Save gradients[name][i] for each i under a name of its own."
        )
    if not loaded.card.num_classes:
        raise UserError(
            "save_upload: the model has no classifier, and `mjp attack` reads models with one. "
            "attack_gradients attacks it as it is."
        )


def _inputs(plain: Tensor, labels: Tensor | None, picture: str) -> ClientInput:
    """What was fed: the private images, named after their picture."""
    count = len(plain)
    unknown = torch.full((count,), UNKNOWN_LABEL)
    ids = [f"{picture} {place}" if count > 1 else picture for place in range(count)]
    return ClientInput(plain, unknown if labels is None else labels, ids)


def _check_words(gamma: object, round: object, recipe: object) -> None:
    """Raise where what is said of the client is of the wrong kind or out of range."""
    if not is_number(gamma) or not 0 <= gamma <= 1:  # type: ignore[operator]
        raise UserError(f"gamma: expected MJP's ratio, a share from 0 to 1, got {said(gamma)}.")
    if not is_whole(round) or not 0 <= round <= MOST_COUNT:  # type: ignore[operator]
        raise UserError(f"round: expected a whole number from 0, got {said(round)}.")
    if recipe is not None and not isinstance(recipe, Mapping):
        raise UserError(
            "recipe: expected a dictionary of a client's fields, such as {'dal': True}, got "
            f"{said(recipe)}."
        )


def _check_free(root: Path, name: str) -> None:
    """Raise for a name that is no file name, or whose files are there already."""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise UserError(
            "name: expected letters, digits, '.', '-' and '_', at most 200, got "
            f"{said(name)}. It becomes the upload's file name, such as round_3_client_7."
        )
    if root.exists() and not root.is_dir():
        raise UserError(f"{root}: expected a folder or a name for one, got a file.")
    if (root / f"{name}.json").exists():
        raise UserError(
            f"{root / name}.json exists already, and nothing is overwritten. Give another name=…, "
            "or remove the upload's files."
        )


def _three(numbers: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = numbers
    return first, second, third
