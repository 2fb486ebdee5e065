"""`mjp check`: which attacks apply to recorded uploads, and what weakens them silently, such as
momentum or a wrong normalisation in a header; or which apply to a model, before any gradient is
made. What makes an upload unusable altogether is in `uploads.folder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attacks import ATTACKS, find_attack, traits_of
from attacks.equations import HEAD, HEAD_BIAS
from attacks.equations.patch_system import gradient, lacks_gradients
from attacks.step import BREAKDOWN
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value
from mjp_privacy.core.schema import Size, size_text
from mjp_privacy.core.text import by_reason, first_of, shown
from mjp_privacy.experiment.config import AttackConfig, Cell
from mjp_privacy.experiment.recorded import load_group
from mjp_privacy.experiment.source import META, ModelVariants, foreseen, lacking
from mjp_privacy.interfaces import AttackerView, Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import (
    PACKAGED_PREFIX,
    PYTORCH_SUFFIXES,
    TIMM_PREFIX,
    read_metadata,
)
from mjp_privacy.models.loading import RANDOM, outline_model, outline_spec
from mjp_privacy.models.zoo import spec_by_name
from mjp_privacy.uploads.checks import different_pictures, fed_pixels
from mjp_privacy.uploads.folder import Group, examine, group_uploads, one_line
from mjp_privacy.uploads.memory import UNKNOWN_LABEL, answer_of, labels_of, stacked, view_of
from mjp_privacy.uploads.normalisation import declared_wrongly
from mjp_privacy.uploads.record import WEIGHTS_FILE, Upload

HEAD_FITS = 1e-3  # largest error of the classifier's equation that rounding explains
HEAD_FITS_HALF = 0.1  # the same of logits in half precision, and of gradients sent so
LARGEST = 6  # times its standard deviation: noise on no class is larger
LEAST = 2  # uploads that an attack on several is asked with
TRIED = 5  # number of series whose pixels are looked at


# what helps to read the results of a group of uploads; none of it is an error ---------------------


def remarks(group: Group, model: LoadedModel) -> Iterator[str]:
    """What weakens attacks on a group of uploads, and what its header says otherwise than uploads
    and weights, a sentence each."""
    header, client, first = group.header, group.header.recipe, group.series[0].first
    if client.upload == "weight_difference" and client.pseudo_gradient == "approximate":
        yield (
            f"a weight difference of {client.steps} {client.optimizer} step(s) with momentum "
            f"{client.momentum:g}: its pseudo-gradient is approximate, and rows say so"
        )
    absent = [name for name, _ in model.named_parameters() if name not in first.sent]
    if absent and not header.partial:
        yield (
            f"{len(absent)} of the model's parameters were not uploaded, {first_of(absent, 1)}; "
            "attacks that read them do not apply"
        )
    if header.gamma and model.unk_embed is None:
        yield f"gamma is {header.gamma:g}, but the model of {header.weights} has no unk_embed"
    declared = read_metadata(str(first.weights_path))
    for name, in_header in (("mean", header.mean), ("std", header.std)):
        told = json_value(declared.get(name, "null"), first.weights_path, WEIGHTS_FILE)
        if told not in (None, list(in_header)):
            both = f"says {name} {shown(told, 100)}, the header {list(in_header)}"
            yield f"the weights file {both}"
    if client.batch > 1 or client.steps > 1 or client.defenses:
        return
    yield from _classifier(group, model)
    for series in group.series[:TRIED]:
        view = seen(series.uploads, model)
        if differ := different_pictures(view):
            yield f"{series.first.name}: {differ}"
        fed = fed_pixels(view)
        if fed is not None and (wrong := declared_wrongly(fed, header.mean, header.std)):
            yield f"{series.first.name}: {wrong} (the header's `mean` and `std`)"
            return


def _classifier(group: Group, model: LoadedModel) -> Iterator[str]:
    """A classifier's gradient that does not fit the recorded weights.

    Cross-entropy on one image gives the classifier's bias the gradient softmax - onehot, and the
    softmax can be read off (`answer_of`). With other weights than the client's they differ.
    """
    view = seen(group.series[0].uploads[:1], model)
    update = view.updates[0]
    two_heads = any(name.startswith("head_dist.") for name in update.grads)  # whose mean is taken
    if update.optimizer != "sgd" or two_heads or lacks_gradients(view, HEAD, HEAD_BIAS):
        return
    sent = {name: gradient(view, update, name)[0] for name in (HEAD, HEAD_BIAS)}
    expected = answer_of(sent, view.model)
    expected[sent[HEAD_BIAS].argmin()] -= 1
    worst = float((expected - sent[HEAD_BIAS]).abs().max())
    noise = update.noise.get(HEAD_BIAS, torch.zeros(1))
    halved = update.autocast != "none" or HEAD_BIAS in update.rounding
    if worst > (HEAD_FITS_HALF if halved else HEAD_FITS) + LARGEST * float(noise[0]):
        yield (
            f"the classifier's gradient in {group.series[0].first.name} does not fit "
            f"{group.header.weights} (off by {worst:.2g} where only rounding is expected): these "
            "may be other weights than the client's, the sign or learning rate may be wrong, or "
            "the loss is not cross-entropy on one label"
        )


def seen(uploads: Sequence[Upload], model: LoadedModel) -> AttackerView:
    """What an attacker sees of uploads of a series, each with the weights it was computed with;
    model: that of the first."""
    names = [name for name, _ in model.named_parameters()]
    first = uploads[0]
    models = [model if u.header.weights == first.header.weights else u.model() for u in uploads]
    labels = labels_of(first, model)
    known = None if (labels == UNKNOWN_LABEL).any() else labels
    updates = [stacked([upload], names, torch.device("cpu")) for upload in uploads]
    return view_of(updates, models, known, "plain" if first.header.gamma else "input")


def applicability(group: Group, model: LoadedModel) -> dict[str, str]:
    """{attack: why it does not apply to this group, "" if it does}, for all attacks.

    An attack on several uploads is asked with those that are recorded, at least two; its name says
    so: "multi_round with the 2 recorded (6 by default)".
    """
    reasons: dict[str, str] = {}
    there = max(LEAST, min(len(series.uploads) for series in group.series))
    for name in ATTACKS:
        title, attack = name, find_attack(name)
        assert not isinstance(attack, Control)
        default = attack.uploads
        if default > there and "uploads" in attack.__dataclass_fields__:  # type: ignore[attr-defined]
            attack = find_attack(name, {"uploads": there})
            assert not isinstance(attack, Control)
            title = f"{name} with the {there} recorded ({default} by default)"
        refusal = lacking(group.series, attack, model)
        if refusal is None:
            view = seen(group.series[0].uploads[: attack.uploads], model)
            refusal = attack.unsupported(view)
        reasons[title if refusal is None else name] = "" if refusal is None else refusal.text
    return reasons


# the report ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedGroup:
    """Uploads of one kind of client, and which attacks apply to them."""

    name: str
    uploads: int
    images: int
    kind: str  # gradient or weight_difference
    batch: int
    steps: int
    private_images_known: bool
    faults: tuple[str, ...] = ()  # why none of them can be attacked
    notes: tuple[str, ...] = ()
    applies: tuple[str, ...] = ()
    does_not_apply: Mapping[str, str] = field(default_factory=dict)  # why, by attack

    def lines(self) -> Iterator[str]:
        """As they are printed."""
        known = self.private_images_known
        yield (
            f"{self.name}: {self.uploads} upload(s) of {self.images} image(s), {self.kind}, "
            f"batch {self.batch}, {self.steps} local step(s), "
            f"{'private images known' if known else 'no private images: rows will be unscored'}"
        )
        yield from (f"  note   {note}" for note in self.notes)
        yield from (f"  FAULT  {fault}" for fault in self.faults)
        if not self.faults:
            yield f"  applies: {', '.join(self.applies)}"
        yield from (f"  {line}" for line in by_reason(self.does_not_apply))


@dataclass(frozen=True)
class CheckedFolder:
    """What `mjp check` says of a folder of uploads."""

    usable: bool  # whether every one of the uploads can be attacked
    refused: Mapping[str, Sequence[str]]  # why uploads cannot be attacked, by name
    notes: Sequence[str]
    groups: Sequence[CheckedGroup]

    def text(self) -> str:
        """As it is printed."""
        lines = []
        if self.refused:
            count = len(self.refused)
            lines.append(f"{count} upload(s) cannot be attacked; a run makes a failed row of each:")
        for name, reasons in self.refused.items():
            lines += [f"  FAULT  {name}: {reason}" for reason in reasons]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *(line for group in self.groups for line in group.lines())])


def check_uploads(folder: Path) -> CheckedFolder:
    """A report on all uploads of a folder: print(check_uploads(folder).text())."""
    examined = examine(folder)
    groups = [_checked(g) for g in group_uploads(examined.known, refused=examined.refused)]
    usable = not examined.refused and not any(group.faults for group in groups)
    return CheckedFolder(usable, examined.refused, examined.remarks, groups)


def _checked(group: Group) -> CheckedGroup:
    client, notes, faults = group.header.recipe, list[str](), list[str]()
    reasons: Mapping[str, str] = {}
    try:
        model = load_group(group)
        notes += remarks(group, model)
        reasons = applicability(group, model)
    except (UserError, *BREAKDOWN) as error:  # of numbers at the edge of their range
        fault = one_line(error, group.series[0].first.folder)
        known = isinstance(error, UserError)  # of the others the run makes rows
        faults.append(fault if known else f"its linear algebra broke down: {shown(fault)}")
    return CheckedGroup(
        group.name,
        sum(len(series.uploads) for series in group.series),
        len(group.records),
        *(client.upload, client.batch, client.steps),
        group.scored,
        faults=tuple(faults),
        notes=tuple(notes),
        applies=tuple(name for name, reason in reasons.items() if not reason),
        does_not_apply={name: reason for name, reason in reasons.items() if reason},
    )


# of a model ---------------------------------------------------------------------------------------

FILES = (".safetensors", *PYTORCH_SUFFIXES)
PREFIXES = (PACKAGED_PREFIX, TIMM_PREFIX)


@dataclass(frozen=True)
class ModelAnswer:
    """A line on the model, remarks, and by attack: "yes", with what it takes, or "no" and why."""

    model: str
    notes: Sequence[str]
    attacks: Mapping[str, str]

    def text(self) -> str:
        """As it is printed: attacks that do not apply for one reason stand together."""
        width = max(map(len, ATTACKS)) + 2
        lines = [self.model, *(f"  note   {note}" for note in self.notes)]
        lines += ["", f"{'attack':{width}}applies"]
        fits = {name: answer for name, answer in self.attacks.items() if answer[:3] == "yes"}
        lines += [f"{name:{width}}{answer}" for name, answer in fits.items()]
        left = {n: why.removeprefix("no: ") for n, why in self.attacks.items() if n not in fits}
        return "\n".join([*lines, *by_reason(left)])


def check_model(
    model: str,
    img_size: Size | None = None,
    batch: int = 1,
    withhold: Sequence[str] = (),
    mjp: bool = False,
) -> ModelAnswer:
    """Which attacks apply to a model, before anything is computed.

    check_model("vit_tiny_patch16_224", img_size=192)

    model     a name, a file or folder of weights, packaged:NAME or timm:NAME
    withhold  parameters whose gradient is not uploaded
    mjp       ask for a client that shuffles, whose model has E_unk
    """
    arguments = {**_place(model), "img_size": img_size}
    own = outline_model(**arguments)
    asked, client = own, ClientConfig(batch=batch, withhold=tuple(withhold))
    FedSGDClient(own, client).wanted(None)  # raises for a parameter that it does not have
    if mjp and own.unk_embed is None:
        asked = outline_model(**arguments, unknown_embedding=True, unknown_init="zeros")
    line = f"{model}: {_described(own, outline_spec(**arguments)[0].num_heads, mjp)}"
    notes = []
    if own.unk_embed is None and mjp:
        notes.append(
            "asked as an MJP client with an E_unk that was not trained, as in "
            "configs/ladder_vit.yaml"
        )
    return ModelAnswer(line, notes, _answers(asked, client, "c" if mjp else "a"))


def _place(model: str) -> dict[str, Any]:
    """The name and the checkpoint that `outline_model` takes."""
    try:
        if not ("/" in model or model.endswith(FILES)):
            return {"name": model, "checkpoint": spec_by_name(model).checkpoint or RANDOM}
    except UserError:
        if not (model.startswith(PREFIXES) or Path(model).exists()):  # such as a folder of weights
            raise
    return {"checkpoint": model}


def _described(model: LoadedModel, heads: int | None, mjp: bool) -> str:
    """The sizes that decide, and how many blocks and heads; of timm's other networks their
    class. mjp: the model is asked about with an E_unk."""
    patch, card = model.patch_size, model.card
    told = "heads not known" if heads is None else f"{heads} heads"
    own = card.architecture.partition(" ")[0]
    if model.family == "vit":
        own = f"{len(model.blocks)} blocks, {told}"
    masks = "E_unk (it can mask)"
    if model.unk_embed is None:
        asks = "" if model.pos_embed is None else "; --mjp asks about it with one"
        masks = "no E_unk of its own" if mjp else f"no E_unk (it cannot mask{asks})"
    return (
        f"N = {model.patch_embed.num_patches} patches of {patch}×{patch} at "
        f"{size_text(card.img_size)} px, width D = {model.embed_dim}, "
        f"p = {model.patch_embed.proj.weight[0].numel()} values a patch, "
        f"{own}, {masks}"
    )


UNMASKED = {"unshuffled uploads", "shuffled alone"}
"""Traits of attacks that refuse pictures with masked patches."""
FOR_BATCHES = {"batches", "steps", "no picture"}
"""Traits of attacks that return no mixtures of a batch's pictures."""


def _answers(model: LoadedModel, client: ClientConfig, setting: str) -> dict[str, str]:
    """By attack: "yes", with what it takes, or "no" and the reason."""
    variants, answers = ModelVariants(model, META), {}
    for name in ATTACKS:
        attack = find_attack(name)
        assert not isinstance(attack, Control)
        cell = Cell("", setting, 0.0, "float32", AttackConfig(name), None, None, client)  # type: ignore[arg-type]
        refusal = foreseen(variants, cell)
        takes = []
        if client.batch > 1 and not FOR_BATCHES & traits_of(name):
            takes.append("mixtures of the batch's pictures")
        if attack.victim == "april_block" and model.first_block == "intact":
            takes.append("of a client that trains a block 0 without norm1 and residuals")
        if attack.uploads > 1:
            shares = "shared pictures" in traits_of(name)
            of = "batches that share pictures" if shares else "the same picture"
            takes.append(f"{attack.uploads} uploads of {of}")
        if setting == "c" and UNMASKED & traits_of(name):
            takes.append("of steps that masked nothing")
        yes = f"yes, {'; '.join(takes)}" if takes else "yes"
        answers[name] = yes if refusal is None else f"no: {refusal.text}"
    return answers
