"""Uploads in memory, as the updates that attacks read: recorded ones, and a user's own step, of
which `save_upload` makes a recorded one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attacks.equations import HEAD, HEAD_BIAS, TABLE
from attacks.equations.block import layer_scales
from attacks.equations.sent_gradients import (
    less_undeclared_decay,
    pseudo_gradient,
    rounding_error,
)
from attacks.masked_span import WEIGHED
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.defenses.disturbance import Deviations, Draws, added
from mjp_privacy.client.defenses.published import GaussianNoise
from mjp_privacy.client.defenses.registry import StepDefense, defense_of
from mjp_privacy.client.upload import label_in_gradient, shown_autocast, weights_of
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.schema import Size, size_text
from mjp_privacy.core.text import counted
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.live.modules import Channels, load_module, rebuilt_by_name
from mjp_privacy.models.vit import copied
from mjp_privacy.uploads.reading import (
    Held,
    Labels,
    Models,
    ToldErrors,
    images_in_a_step,
    modules_of,
    read_gradients,
    read_images,
    read_labels,
    read_step,
    refusal,
    said,
    separate_uploads,
)
from mjp_privacy.uploads.reading import Images as Pictures
from mjp_privacy.uploads.record import (
    Upload,
    UploadHeader,
    check_header,
    record_weights,
    write_upload,
)

UNKNOWN_LABEL = -1
SEVERAL = 0.2  # share of the strongest class's gradient from which another one's counts as such
ALIKE, LOW = 0.25, 0.1
"""Of the largest entry, from which that at this share of a tensor's is about as large: .31 or more
in one to eight steps of Adam, .19 at most in a gradient of which 60 % of entries were clipped."""
TURNED = 0.02  # how far a gradient may be from that of a turned sign, as a share of it
LITTLE_SCALE = 1e-3  # of a block's branches, up to which attacks on tokens failed in float32
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

# recorded uploads ---------------------------------------------------------------------------------


def stacked(uploads: Sequence[Upload], names: Sequence[str], device: torch.device) -> ClientUpdate:
    """Uploads of one kind of client as one update with a leading axis, on the device.

    It holds those of the names that every upload has. What the uploads share, such as the learning
    rate, is taken from the first one.
    """
    header = uploads[0].header
    parts = [upload.tensors(names) for upload in uploads]
    common = [name for name in names if all(name in part for part in parts)]
    dtype = getattr(torch, header.dtype)
    grads = {name: torch.stack([part[name] for part in parts]).to(device, dtype) for name in common}
    client = header.recipe
    undeclared = [  # a defence that only scales examples has nothing to declare
        each.undeclared or (client.has_errors and not (each.noise or each.rounding))
        for each in (upload.header for upload in uploads)
    ]

    def levels(of: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
        """Standard deviations (n,) by name, but for those that are zero in every upload."""
        told = [name for name in common if any(each.get(name) for each in of)]
        values = {name: [each.get(name, 0.0) for each in of] for name in told}
        return {n: torch.tensor(v, dtype=torch.float64).to(device) for n, v in values.items()}

    return ClientUpdate(
        grads,
        dtype=dtype,
        round=header.round,
        noise=levels([upload.header.noise for upload in uploads]),
        rounding=levels([upload.header.rounding for upload in uploads]),
        undeclared=torch.tensor(undeclared) if client.defenses else None,
        **as_shown(client, grads).stated,
    )


def as_shown(client: ClientConfig, grads: Mapping[str, Tensor]) -> ClientConfig:
    """The client, with the autocast that its upload shows where nobody said any."""
    shown = shown_autocast(grads) if client.autocast == "none" else client.autocast
    return replace(client, autocast=shown)


def labels_of(upload: Upload, model: LoadedModel) -> Tensor:
    """The labels (B,) as recorded, or else as the gradient of the classifier tells them; where that
    was not sent, or the batch is larger than one, they are UNKNOWN_LABEL."""
    if upload.header.labels is not None:
        return torch.tensor(upload.header.labels)
    label = shown_labels(stacked([upload], [HEAD, HEAD_BIAS], torch.device("cpu")), model)
    unknown = torch.full((upload.header.recipe.batch,), UNKNOWN_LABEL)
    return unknown if label is None else label


def shown_labels(update: ClientUpdate, model: LoadedModel) -> Tensor | None:
    """The labels (n,) that the classifier's gradient tells of n single images; else None."""
    return label_in_gradient(classifier_gradient(update, model)) if update.batch == 1 else None


def classifier_gradient(update: ClientUpdate, model: LoadedModel) -> dict[str, Tensor]:
    """The gradient of the classifier's weight and bias (n, *shape) as far as they were sent."""
    sent = {name: update.grads[name] for name in (HEAD, HEAD_BIAS) if name in update.grads}
    if update.kind == "gradient":
        return sent
    assert update.lr
    before = {name: model.get_parameter(name).detach().to(sent[name]) for name in sent}
    if update.optimizer == "sgd":
        return {n: pseudo_gradient(update, d, before, n).to(d) for n, d in sent.items()}
    return {n: -d / update.lr - update.weight_decay * before[n] for n, d in sent.items()}


def view_of(
    updates: Sequence[ClientUpdate],
    models: Sequence[LoadedModel],
    labels: Tensor | None,
    against: Literal["input", "plain"] = "plain",
) -> AttackerView:
    """What an attacker sees of the update of each round, and the model that the round began
    with."""
    first = models[0]
    with_weights = [
        replace(update, weights_before=None if model is first else weights_of(model))
        for update, model in zip(updates, models[: len(updates)], strict=True)
    ]
    pixels = Pixels(first.card.img_size, first.card.mean, first.card.std)
    return AttackerView(first, with_weights, pixels, labels, against)


# of a user's own ---------------------------------------------------------------------------------


def declared_errors(
    client: ClientConfig, sent: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Standard deviations (n,) by name of the noise and the rounding that the client's defences
    left on what it sent, and whether the upload does not tell one of them.

    Recipe and upload alone tell them (`client/defenses/disturbance.py`): a defence without noise
    changes nothing more where it is applied to its own result. Of two defences that change a whole
    upload nobody sees what lay between them, so one is taken.
    """
    steps, texts = len(next(iter(sent.values()))), client.defenses
    noise: Deviations = {}
    rounding: Deviations = {}
    unknown = False
    defenses = [defense_of(text) for text in texts]
    whole = [defense for defense in defenses if not isinstance(defense, StepDefense)]
    if len(whole) > 1 or (texts and client.upload == "weight_difference"):
        got = f"{said(list(texts))} of a {client.upload}"
        do = "Give what they left on an entry, in the upload's own units: noise=… and rounding=…."
        raise refusal("defenses", "dp_sgd and at most one other of a gradient", got, do)
    for defense in defenses:
        if isinstance(defense, StepDefense):
            level = defense.deviation(client.batch)
            noise = dict.fromkeys(sent, torch.full((steps,), level, dtype=torch.float64))
        elif isinstance(defense, GaussianNoise):
            noise = added(noise, dict.fromkeys(sent, defense.public_deviation(sent)))
        else:
            made = defense.apply(sent, Draws(0, [""] * steps, 0))
            noise, rounding = added(noise, made.noise), added(rounding, made.rounding)
            unknown |= any(bool(silent.any()) for silent in made.unknown.values())
    return _nonzero(noise), _nonzero(rounding), unknown


def _nonzero(levels: Deviations) -> dict[str, Tensor]:
    return {name: level for name, level in levels.items() if bool(level.any())}


def half_precision_error(sent: Tensor) -> Tensor:
    """(n,) standard deviation of the rounding of numbers (n, *shape) of less than 32 bits; 0 where
    it is so small that exact equations serve better (float16, but not bfloat16)."""
    kind = torch.finfo(sent.dtype)
    if kind.bits >= 32:
        return torch.zeros(len(sent), dtype=torch.float64)
    error = rounding_error(sent, sent.dtype, kind.tiny)
    size = sent.double().flatten(1).square().mean(1).sqrt()
    return torch.where(error < WEIGHED * size, 0.0, error)


@dataclass(frozen=True)
class OwnUploads:
    """What a user gave: the upload of each round, and the model that the round began with."""

    updates: Sequence[ClientUpdate]
    models: Sequence[LoadedModel]
    labels: Tensor | None  # (B,)
    label_source: Literal["given", "read off the gradient", "unknown"]
    notes: tuple[str, ...]  # what may be mistaken in what was given
    client: ClientConfig

    def view(self) -> AttackerView:
        """Everything that an attacker may use."""
        return view_of(self.updates, self.models, self.labels)


def own_uploads(
    model: Models,
    gradients: Held,
    facts: Mapping[str, Any],
    *,
    labels: Labels | None = None,
    images: Pictures | None = None,
    as_sent: bool = False,
    others: Iterable[str] = (),
    **pixels: Any,
) -> OwnUploads:
    """Read models and gradients, and the label off the gradient where none is given.

    facts    the client's, as `attack_gradients` takes them
    as_sent  whether weight decay that nobody declared stays in the gradients
    others   keywords of the function that is called, with which a misspelt one is compared as well
    pixels   mean, std and img_size, as in `attack_gradients`
    """
    held = separate_uploads(gradients)
    modules = modules_of(model, len(held))
    loaded = {id(module): load_module(module, **pixels) for module in modules}
    for key, own in loaded.items():
        if own.like.device.type != "cpu":  # where the gradients are
            loaded[key] = copied(own).to("cpu")
    models = [loaded[id(module)] for module in modules]
    sent = [read_gradients(*one) for one in zip(held, modules, models, strict=True)]
    client, errors = read_step(facts, lambda: images_in_a_step(labels, images), others)
    updates = [_update_of(one, client, errors, number) for number, one in enumerate(sent)]
    notes = list[str]()
    for number, of in enumerate(() if as_sent else models):
        updates[number], decays = less_undeclared_decay(updates[number], weights_of(of))
        if decays:
            more = " and ".join(dict.fromkeys(f"{decay:.2g}" for decay in decays))
            notes.append(
                f"some gradients hold {more} times their weights beyond the declared weight decay, "
                "as sums show that norms make 0 else: that was taken out"
            )
    notes += _notes_of_step(updates[0], models[0])
    told, doubts = _told_labels(updates, models)
    notes += doubts
    given = None
    if labels is not None:
        given = read_labels(labels, client.batch, models[0].card.num_classes)
        if told is not None and not torch.equal(told, given):
            notes.append(
                f"labels {given.tolist()} were given, and the classifier's gradient says "
                f"{told.tolist()}: residuals are wrong if the given ones are"
            )
    source: Any = "given"
    if given is None:
        source = "unknown" if told is None else "read off the gradient"
    known = told if given is None else given
    return OwnUploads(updates, models, known, source, tuple(dict.fromkeys(notes)), client)


def _notes_of_step(update: ClientUpdate, model: LoadedModel) -> Iterator[str]:
    """What is to be known of a step and its network to read the results."""
    if TABLE not in update.grads and getattr(model, TABLE, None) is not None:
        yield (
            f"the gradient of {TABLE} is missing or zero throughout, as of a frozen table, or does "
            "not tell those of the patches to which it is stretched: it is taken as withheld"
        )
    card = model.card
    if tower := getattr(model, "tower", ""):
        yield (
            f"the network takes more than a picture: its part {tower} is read, whose outputs tell "
            "no class; mean and std are of what that part is given"
        )
    if getattr(model, "normalises", False):
        of_both = [", ".join(f"{v:.4g}" for v in values) for values in (card.mean, card.std)]
        yield (
            "the network normalises pictures itself; after what was declared that makes mean "
            f"{of_both[0]} and std {of_both[1]}, which are those that notes and verdict name"
        )
    if (whole := model.whole_size) is not None:
        yield (
            f"of pictures of {size_text(whole)} px the network embeds {size_text(card.img_size)}: "
            "what is beyond whole patches is in no gradient"
        )
    block = next(iter(getattr(model, "blocks", nn.Identity()).children()), nn.Identity())
    scale = max(float(f(torch.ones(())).detach().abs().max()) for f in layer_scales(block))
    if scale <= LITTLE_SCALE and update.dtype == torch.float32:
        yield (
            f"the first block's layer scale is {scale:.1g} at most: float32 rounds off what attacks"
            " on tokens read of its branches; that they fail is no evidence of safety"
        )
    if update.optimizer == "adamw":
        yield (
            "an AdamW step sends most entries of the gradient by their sign alone (of their size "
            "it holds what the weights' precision resolves): that attacks fail on it is no "
            "evidence of safety"
        )
    elif _is_of_signs(update):
        yield (
            "nearly all entries have one size: this looks like the step of Adam or of signs "
            "(optimizer='adamw', kind='weight_difference', lr=…), which attacks take for a gradient"
        )


def _is_of_signs(update: ClientUpdate) -> bool:
    """Whether the largest tensors' entries have nearly one size, and no defence made them so."""
    sizes = sorted((g.abs() for g in update.grads.values() if g.ndim > 2), key=Tensor.numel)[-3:]
    low = [size.flatten().kthvalue(1 + int(LOW * size.numel())).values for size in sizes]
    alike = [bool(one > ALIKE * size.max()) for one, size in zip(low, sizes, strict=True)]
    return bool(alike) and all(alike) and update.undeclared is None


def _told_labels(
    updates: Sequence[ClientUpdate], models: Sequence[LoadedModel]
) -> tuple[Tensor | None, list[str]]:
    """The label (1,) of a single picture that the classifier's gradient tells, and what speaks
    against it, or against what was said of the step."""
    first, doubts = updates[0], list[str]()
    tower, step = getattr(models[0], "tower", ""), first.batch
    both = zip(updates, models, strict=True)
    shown = [None if tower else shown_labels(update, of) for update, of in both]
    classes = sorted({tuple(labels.tolist()) for labels in shown if labels is not None})
    told = shown[0]
    head = {} if tower else {n: g[0] for n, g in classifier_gradient(first, models[0]).items()}
    several, turned = 1, False
    if HEAD_BIAS in head and not first.noise and (step == 1 or first.optimizer == "sgd"):
        bias = head[HEAD_BIAS]
        several = int((bias < min(SEVERAL * float(bias.min()), 0.0)).sum())
        turned = step == 1 and _is_turned(head, models[0])
    if turned or several > step:
        told = None
    if turned or (several > step and not _is_of_signs(first)):
        pictures = counted(step, "picture")
        another = "of weights after minus before (give kind='weight_difference' and lr=…)"
        if first.kind == "weight_difference":
            another = "of weights before minus after, or of a step that climbs"
        doubts.append(
            "the classifier's gradient has one positive entry, where that of a picture has one "
            f"negative one: this looks like a turned sign, as {another}"
            if turned
            else f"the classifier's gradient points to at least {several} classes, and that of "
            f"{pictures} to {step} at most: this looks like a larger batch (give batch=…) or mixup"
        )
    if told is not None and len(classes) > 1:
        told = None
        doubts.append(
            "the classifier's gradients of these uploads point to different classes, "
            f"{', '.join(str([*each]) for each in classes)}, but several uploads are "
            "taken as of the same pictures: attack those of different pictures alone"
        )
    return told, doubts


def _update_of(
    sent: Mapping[str, Tensor], client: ClientConfig, errors: ToldErrors, round: int
) -> ClientUpdate:
    """What was sent in a round; numbers of less than 32 bits become float32, with their rounding
    declared where it is large enough to be weighed."""
    if TABLE in sent and not bool(sent[TABLE].any()):  # a frozen table, sent as zeros
        sent = {name: tensor for name, tensor in sent.items() if name != TABLE}
    double = any(tensor.dtype == torch.float64 for tensor in sent.values())
    dtype = torch.float64 if double else torch.float32
    wide = {name: sent[name].to(dtype) for name in sorted(sent)}
    noise, rounding, unknown = declared_errors(client, wide)
    told = {name: torch.full((1,), errors.noise, dtype=torch.float64) for name in sent}
    halved = {
        name: (half_precision_error(tensor).square() + errors.rounding**2).sqrt()
        for name, tensor in sent.items()
    }
    noise, rounding = _nonzero(added(noise, told)), _nonzero(added(rounding, halved))
    hidden = unknown or (client.has_errors and not (noise or rounding))
    return ClientUpdate(
        wide,
        dtype=dtype,
        round=round,
        noise=noise,
        rounding=rounding,
        undeclared=torch.tensor([hidden]) if client.defenses else None,
        **as_shown(client, wide).stated,
    )


def answer_of(head: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """softmax(W f + c), (K,), of one picture: the gradient of the classifier's weight W is b f^T
    and that of its bias c is b, which tells the feature f."""
    bias, sent = head[HEAD_BIAS].double(), head[HEAD].double()
    weight, offset = (model.get_parameter(name).detach().to(bias) for name in (HEAD, HEAD_BIAS))
    feature = bias @ sent / bias.square().sum().clamp_min(1e-300)
    return (weight @ feature + offset).softmax(0)


def _is_turned(head: Mapping[str, Tensor], model: LoadedModel) -> bool:
    """Whether the gradient of the classifier's bias has one positive entry and several negative
    ones, as a label less softmax, and is that. Smoothed labels give such signs too, where a network
    is sure of another class."""
    bias = head[HEAD_BIAS].double()
    if int((bias > 0).sum()) != 1 or int((bias < 0).sum()) < 2:
        return False
    if HEAD not in head:
        return True
    turned = -answer_of(head, model)
    turned[bias.argmax()] += 1
    scale = float(bias @ turned / turned.square().sum())
    off = float((bias - scale * turned).norm() / bias.norm())
    return off < TURNED and scale < 1 + TURNED  # clipped: less than 1


# the recorded format ------------------------------------------------------------------------------


@torch.inference_mode(False)
def save_upload(
    folder: str | Path,
    model: nn.Module,
    gradients: Held = None,
    *,
    name: str = "upload",
    label: str | None = None,
    mean: Channels = None,
    std: Channels = None,
    img_size: Size | None = None,
    labels: Labels | None = None,
    images: Pictures | None = None,
    round: int = 0,
    series: str | None = None,
    gamma: float = 0.0,
    **step: Any,
) -> Path:
    """Write one upload and the weights it was made with into a folder; the path of its tensors.

    save_upload("uploads", model, gradients, name="round_3", mean=0.5, std=0.5)

    folder  of uploads, made if it is not there: `mjp check FOLDER`, then
            `mjp attack uploads --uploads FOLDER`
    name    the upload's file name; nothing is overwritten
    label   what tables call this client; the folder's name by default
    images  the private images, if the reports shall have scores: (B, 3, S, S) in [0, 1], resized
            and cropped as the client fed them, not normalised and not shuffled. They are written
            to FOLDER/truth: leave that out when you pass the folder on
    labels  recorded only if given; else the attacker reads them off the gradient, as here
    series  uploads with the same series name hold the same images, for attacks on several
    gamma   MJP's ratio
    step    what is public of the client's step, as in `attack_gradients`: kind, batch, lr, ...
    model, gradients, labels, mean, std, img_size  as in `attack_gradients`
    """
    root = _free_folder(folder, name)
    pixels: dict[str, Any] = {"mean": mean, "std": std, "img_size": img_size}
    pixels |= {"labels": labels, "images": images, "others": signature(save_upload).parameters}
    own = own_uploads(model, gradients, step, as_sent=True, **pixels)
    update, loaded = own.updates[0], own.models[0]
    if len(own.updates) > 1:
        got = f"{len(own.updates)} of them"
        do = "Save each under a name of its own; those of the same images get the same series=…."
        raise refusal("gradients", "one upload", got, do)
    card, batch, given = loaded.card, update.batch, None if labels is None else own.labels
    if not card.num_classes or not rebuilt_by_name(loaded):
        expected = "one of colour pictures with a classifier that its name builds again, as timm's"
        got = f"{card.name} with {card.num_classes} classes"
        raise refusal("model", expected, got, "attack_gradients attacks it as it is.")
    fed = plain = None
    if images is not None:
        picture = series or name
        ids = tuple(f"{picture} {place}" if batch > 1 else str(picture) for place in range(batch))
        plain = read_images(images, batch, card.img_size, len(card.mean)).float()
        unknown = torch.full((batch,), UNKNOWN_LABEL)
        fed = ClientInput(plain, unknown if given is None else given, ids)
    header = UploadHeader(
        label=root.resolve().name if label is None else label,
        weights="weights",
        mean=tuple(card.mean),  # type: ignore[arg-type]
        std=tuple(card.std),  # type: ignore[arg-type]
        gamma=gamma,
        series=series,
        round=round,
        recipe=as_shown(own.client, update.grads),
        labels=None if given is None else tuple(given.tolist()),
    )
    check_header(header, root / f"{name}.json")  # as whoever reads it will
    header = replace(header, weights=record_weights(root, loaded))
    if not _is_read_back(Upload(root, name, header), loaded):
        (root / header.weights).unlink()
        got = f"{card.name} with settings of its own, which no file of weights holds"
        expected = "one that its name and weights build again"
        raise refusal("model", expected, got, "attack_gradients attacks it as it is.")
    return write_upload(root, name, header, replace(update, round=round), fed, plain)


def _is_read_back(upload: Upload, model: LoadedModel) -> bool:
    """Whether the model that this upload's file of weights gives computes the same."""
    x = model.probe("a model read back")
    try:
        again = upload.model().to(model.like)
        with torch.no_grad():
            read_back, own = again(x), model(x)
    except (UserError, RuntimeError):  # of shapes
        return False
    return read_back.shape == own.shape and torch.allclose(read_back, own, rtol=1e-3, atol=1e-4)


def _free_folder(folder: object, name: object) -> Path:
    """The folder; UserError where it is none, or `name` is no file name or in use."""
    if not isinstance(folder, str | Path) or "\0" in str(folder) or not str(folder).strip():
        raise refusal("folder", "the path of a folder", said(folder), "Give such as 'uploads'.")
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise refusal("folder", "a folder or a name for one", f"a file, {root}", "Give another.")
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        expected = "letters, digits, '.', '-' and '_', at most 200"
        raise refusal("name", expected, said(name), "It becomes the upload's file name.")
    if (root / f"{name}.json").exists():
        raise UserError(f"{root / name}.json exists already. Give another name=…, or remove it.")
    return root
