"""`mjp check`: which attacks apply to recorded uploads, and what weakens them silently, such as
momentum or a wrong normalisation in a header; or which apply to a model, before any gradient is
made. What makes an upload unusable altogether is in `uploads.faults`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attacks import ATTACKS, find_attack, traits_of
from attacks.equations import HEAD, HEAD_BIAS, TABLE
from attacks.equations.patch_system import gradient, lacks_gradients, weights
from attacks.equations.sent_gradients import holds_no_gradient
from attacks.prior.files import SHIPPED
from attacks.step import BREAKDOWN
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import json_value
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.experiment.config import AttackConfig, Cell
from mjp_privacy.experiment.diagnostics import shows_no_mask
from mjp_privacy.experiment.recorded import load_group
from mjp_privacy.experiment.refusals import META, foreseen, lacking
from mjp_privacy.experiment.source import ModelVariants
from mjp_privacy.interfaces import AttackerView, Control, Pixels
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import (
    PACKAGED_PREFIX,
    PYTORCH_SUFFIXES,
    TIMM_PREFIX,
    check_is_there,
    read_metadata,
)
from mjp_privacy.models.loading import RANDOM, outline_model, outline_spec
from mjp_privacy.models.zoo import spec_by_name
from mjp_privacy.uploads.checks import declared_wrongly, fed_pixels
from mjp_privacy.uploads.faults import examine, one_line
from mjp_privacy.uploads.folder import Group, Series, UploadFolder, group_uploads
from mjp_privacy.uploads.record import (
    UNKNOWN_LABEL,
    WEIGHTS_FILE,
    stacked,
)

HEAD_FITS = 1e-3  # largest error of the classifier's equation that rounding explains
HEAD_FITS_HALF = 0.1  # the same of logits in half precision
SHOWN = 3  # number of unshuffled uploads that are named
LEAST = 2  # uploads that an attack on several is asked with
TRIED = 5  # number of series whose pixels are looked at


# what helps to read the results of a group of uploads, a sentence each; none is an error ----------


def remarks(group: Group, model: LoadedModel) -> Iterator[str]:
    """All that there is to say of a group of uploads."""
    for of in REMARKS:
        yield from of(group, model)


def _difference(group: Group, model: LoadedModel) -> Iterator[str]:
    """Of weight differences: whether they hold a gradient, and whether exactly."""
    header, first = group.header, group.series[0].first
    if header.kind != "weight_difference":
        return
    refusal = holds_no_gradient(stacked([first], [], torch.device("cpu")))
    if refusal is not None:
        yield f"{refusal.text}; train with plain SGD, or upload gradients"
    elif header.client_config(first.name).pseudo_gradient == "approximate":
        yield (
            f"a weight difference of {header.steps} {header.optimizer} step(s) with momentum "
            f"{header.momentum:g}: its pseudo-gradient is approximate, and rows say so"
        )


def _header(group: Group, model: LoadedModel) -> Iterator[str]:
    """What the header and the files of uploads and weights say otherwise than each other."""
    header, first = group.header, group.series[0].first
    parameters, uploaded = [name for name, _ in model.named_parameters()], set(first.names())
    absent = [name for name in parameters if name not in uploaded]
    if absent and not header.partial:
        yield (
            f"{len(absent)} of {len(parameters)} parameters were not uploaded, {absent[0]} among "
            "them; attacks that read them do not apply"
        )
    declared = read_metadata(str(first.weights_path))
    for name, in_header in (("mean", header.mean), ("std", header.std)):
        if name not in declared:
            continue
        said = json_value(declared[name], first.weights_path, WEIGHTS_FILE)
        if said != list(in_header):
            yield f"the weights file says {name} {shown(said, 100)}, the header {list(in_header)}"
    if header.gamma and model.unk_embed is None:
        yield f"gamma is {header.gamma:g}, but the model of {header.weights} has no unk_embed"


def _autocast(group: Group, model: LoadedModel) -> Iterator[str]:
    """Gradients that show an autocast which their header does not name."""
    header, first = group.header, group.series[0].first
    if header.autocast != "none" or header.kind != "gradient":
        return
    kind = view_of(Series((first,)), model).updates[0].autocast
    if kind != "none":
        yield (
            f"the gradients in {first.name} show the rounding of {kind} autocast, which "
            f'attacks take into account; the header may say it: "autocast": "{kind}"'
        )


def _unshuffled(group: Group, model: LoadedModel) -> Iterator[str]:
    """Uploads of an MJP client which show that they masked nothing. A weight difference must be
    read with the weights of its own round."""
    uploads = [upload for series in group.series for upload in series.uploads]
    names = []
    for upload in uploads if group.header.gamma else []:
        own = upload.header.kind == "gradient" or upload.header.weights == group.weights
        view = view_of(Series((upload,)), model if own else upload.model())
        without_mask = shows_no_mask(view, view.updates[0])
        if without_mask is not None and bool((without_mask == 1).all()):
            names.append(upload.name)
    if names:
        yield (
            f"{len(names)} of {len(uploads)} uploads are unshuffled: no row of their gradient of "
            f"{TABLE} is zero, so no patch was masked, and their pictures come back as a plain "
            f"client's do ({first_of(names, SHOWN)})"
        )


def _classifier(group: Group, model: LoadedModel) -> Iterator[str]:
    """A classifier's gradient that does not fit the recorded weights.

    Cross-entropy on one image gives the classifier's bias (c) the gradient b = softmax(W f + c) -
    onehot and its weight (W) the gradient b f^T. So f can be read off, and with other weights than
    the client's the first equation fails.
    """
    header, first = group.header, group.series[0].first
    view = view_of(Series((first,)), model) if _is_one_plain_step(group) else None
    if view is None or lacks_gradients(view, HEAD, HEAD_BIAS) or header.optimizer != "sgd":
        return
    update = view.updates[0]
    weight_grad, bias_grad = gradient(view, update, HEAD)[0], gradient(view, update, HEAD_BIAS)[0]
    feature = weight_grad.mT @ bias_grad / bias_grad.square().sum().clamp_min(1e-300)
    state = weights(view, update)
    expected = (state[HEAD].double() @ feature + state[HEAD_BIAS].double()).softmax(0)
    expected[bias_grad.argmin()] -= 1
    worst = float((expected - bias_grad).abs().max())
    if worst > (HEAD_FITS if update.autocast == "none" else HEAD_FITS_HALF):
        yield (
            f"the classifier's gradient in {first.name} does not fit {header.weights} (off by "
            f"{worst:.2g} where only rounding is expected): these may be other weights than the "
            "client's, the sign or learning rate may be wrong, or the loss is not cross-entropy on "
            "one label"
        )


def _pixels(group: Group, model: LoadedModel) -> Iterator[str]:
    """A mean and std of the header that are not the client's; the first series is tried whose
    gradients determine every patch."""
    for series in group.series[:TRIED] if _is_one_plain_step(group) else ():
        fed = fed_pixels(view_of(series, model))
        if fed is None:
            continue
        if wrong := declared_wrongly(fed, group.header.mean, group.header.std):
            yield f"{series.first.name}: {wrong} (the header's `mean` and `std`)"
        return


def _is_one_plain_step(group: Group) -> bool:
    header = group.header
    return header.batch == 1 and header.steps == 1 and not header.recipe.get("defenses")


REMARKS = (_difference, _header, _autocast, _unshuffled, _classifier, _pixels)


def view_of(series: Series, model: LoadedModel, uploads: int | None = None) -> AttackerView:
    """What an attacker sees of a series, each upload with the weights it was computed with.

    uploads: only the first so many; None: all.
    """
    names = [name for name, _ in model.named_parameters()]
    updates = [stacked([upload], names, torch.device("cpu")) for upload in series.uploads[:uploads]]
    for place, upload in enumerate(series.uploads[:uploads]):
        if upload.header.weights != series.first.header.weights:
            before = {n: p.detach() for n, p in upload.model().named_parameters()}
            updates[place] = replace(updates[place], weights_before=before)
    card, header = model.card, series.first.header
    recorded = series.first.labels(model)
    labels = None if (recorded == UNKNOWN_LABEL).any() else recorded
    pixels = Pixels(card.img_size, card.mean, card.std)
    return AttackerView(model, updates, pixels, labels, "plain" if header.gamma else "input")


def applicability(group: Group, model: LoadedModel) -> dict[str, str]:
    """{attack: why it does not apply to this group, "" if it does}, for all attacks.

    An attack on several uploads is asked with those that are recorded, at least two; its name says
    so: "multi_round with the 2 recorded (6 by default)".
    """
    reasons: dict[str, str] = {}
    recorded = min(len(series.uploads) for series in group.series)
    for name in ATTACKS:
        title, attack = name, find_attack(name)
        assert not isinstance(attack, Control)
        default, there = attack.uploads, max(LEAST, recorded)
        is_option = "uploads" in {field.name for field in dataclasses.fields(attack)}  # type: ignore[arg-type]
        if default > there and is_option:
            attack = find_attack(name, {"uploads": there})
            assert not isinstance(attack, Control)
            title = f"{name} with the {there} recorded ({default} by default)"
        refusal = lacking(group.series, attack, model)
        if refusal is None:
            refusal = attack.unsupported(view_of(group.series[0], model, attack.uploads))
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
        truth = "private images known"
        if not self.private_images_known:
            truth = "no private images: rows will be unscored"
        yield (
            f"{self.name}: {self.uploads} upload(s) of {self.images} image(s), {self.kind}, "
            f"batch {self.batch}, {self.steps} local step(s), {truth}"
        )
        yield from (f"  note   {note}" for note in self.notes)
        yield from (f"  FAULT  {fault}" for fault in self.faults)
        if not self.faults:
            yield f"  applies: {', '.join(self.applies)}"
        yield from (f"  not {name}: {reason}" for name, reason in self.does_not_apply.items())


@dataclass(frozen=True)
class CheckedFolder:
    """What `mjp check` says of a folder of uploads."""

    refused: Mapping[str, Sequence[str]]  # why uploads cannot be attacked, by name
    notes: tuple[str, ...]
    groups: tuple[CheckedGroup, ...]

    @property
    def usable(self) -> bool:
        """Whether every one of the uploads can be attacked."""
        return not self.refused and not any(group.faults for group in self.groups)

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
    examined = examine(UploadFolder(folder))
    groups = group_uploads(examined.known, refused=examined.refused)
    return CheckedFolder(examined.refused, tuple(examined.remarks), tuple(map(_checked, groups)))


def _checked(group: Group) -> CheckedGroup:
    header, uploads = group.header, sum(len(series.uploads) for series in group.series)
    client = header.kind, header.batch, header.steps
    checked = CheckedGroup(group.name, uploads, len(group.records), *client, group.scored)
    try:
        model = load_group(group)
    except UserError as error:
        return replace(checked, faults=(one_line(error, group.series[0].first.folder),))
    notes: list[str] = []
    try:
        notes += remarks(group, model)
        reasons = applicability(group, model)
    except BREAKDOWN as error:  # of numbers at the edge of their range; the run makes rows of it
        fault = f"its linear algebra broke down: {shown(error)}"
        return replace(checked, notes=tuple(notes), faults=(fault,))
    return replace(
        checked,
        notes=tuple(notes),
        applies=tuple(name for name, reason in reasons.items() if not reason),
        does_not_apply={name: reason for name, reason in reasons.items() if reason},
    )


# of a model ---------------------------------------------------------------------------------------

FILES = (".safetensors", *PYTORCH_SUFFIXES)
PREFIXES = (PACKAGED_PREFIX, TIMM_PREFIX)


@dataclass(frozen=True)
class ModelQuestion:
    """What is asked: ModelQuestion("vit_tiny_patch16_224", img_size=192)."""

    model: str  # a name, a file or folder of weights, packaged:NAME or timm:NAME
    img_size: int | None = None
    batch: int = 1
    withhold: Sequence[str] = ()  # parameters whose gradient is not uploaded
    mjp: bool = False  # ask for a client that shuffles, whose model has E_unk

    @property
    def client(self) -> ClientConfig:
        """The client that the attacks are asked about."""
        return ClientConfig(batch=self.batch, withhold=tuple(self.withhold))

    def arguments(self) -> dict[str, object]:
        """The arguments of `outline_model`."""
        shared = {"img_size": self.img_size}
        if self.model.startswith(PREFIXES):
            return {"checkpoint": self.model, **shared}
        if "/" in self.model or self.model.endswith(FILES):
            check_is_there(self.model, "--model")
            return {"checkpoint": self.model, **shared}
        try:
            checkpoint = spec_by_name(self.model).checkpoint or RANDOM
        except UserError:
            if Path(self.model).exists():  # such as a folder of weights
                return {"checkpoint": self.model, **shared}
            raise
        return {"name": self.model, "checkpoint": checkpoint, **shared}


@dataclass(frozen=True)
class ModelAnswer:
    """A line on the model, remarks, and by attack: "yes", with what it takes, or "no" and why."""

    model: str
    notes: tuple[str, ...]
    attacks: Mapping[str, str]

    def text(self) -> str:
        """As it is printed."""
        width = max(map(len, ATTACKS)) + 2
        lines = [self.model, *(f"  note   {note}" for note in self.notes)]
        lines += ["", f"{'attack':{width}}applies"]
        return "\n".join([*lines, *(f"{name:{width}}{a}" for name, a in self.attacks.items())])


def check_model(question: ModelQuestion) -> ModelAnswer:
    """Which attacks apply to a model, before anything is computed."""
    arguments = question.arguments()
    heads = outline_spec(**arguments)[0].num_heads  # type: ignore[arg-type]
    own = outline_model(**arguments)  # type: ignore[arg-type]
    if question.batch < 1:
        raise UserError(f"--batch: expected 1 or more images, got {question.batch}.")
    parameters = [name for name, _ in own.named_parameters()]
    for name in question.withhold:
        if name not in parameters:
            near = did_you_mean(name, parameters, " Such are pos_embed and head.bias.")
            raise UserError(f"--withhold: expected a parameter of the model, got {name!r}.{near}")
    asked = own
    if question.mjp and own.unk_embed is None:
        masked = {**arguments, "unknown_embedding": True, "unknown_init": "zeros"}
        asked = outline_model(**masked)  # type: ignore[arg-type]
    notes = tuple(_remarks(question, own))
    return ModelAnswer(_described(question, own, heads), notes, _answers(question, asked))


def _described(question: ModelQuestion, model: LoadedModel, heads: int | None) -> str:
    patch, width = model.patch_size, model.embed_dim
    return (
        f"{question.model}: N = {model.patch_embed.num_patches} patches of {patch}×{patch} at "
        f"{model.card.img_size} px, width D = {width}, p = {_values(model)} values a patch, "
        f"{_inside(model, heads)}, "
        f"{'E_unk (it can mask)' if model.unk_embed is not None else 'no E_unk (it cannot mask)'}"
    )


def _inside(model: LoadedModel, heads: int | None) -> str:
    """How many blocks and heads a plain ViT has; of timm's other networks their class."""
    if model.family != "vit":
        return model.card.architecture.partition(" ")[0]
    return f"{len(model.blocks)} blocks, {'heads not known' if heads is None else f'{heads} heads'}"


def _remarks(question: ModelQuestion, model: LoadedModel) -> list[str]:
    """What matters where an attack applies."""
    remarks = []
    patch, width, values = model.patch_size, model.embed_dim, _values(model)
    if width < values:
        remarks.append(
            f"D = {width} < p = {values}: the embedding drops {values - width} directions of a "
            f"patch, so {', '.join(n for n in ATTACKS if 'rank' in traits_of(n))} stay below "
            "this rank ceiling; a prior fills them in"
        )
    if not (SHIPPED / f"patch{patch}.safetensors").is_file():
        remarks.append(
            f"no prior was fitted to patches of {patch}×{patch}: `fitted` derives their covariance "
            f"from its spectrum; better: mjp fit-prior --images DIR --patch {patch}"
        )
    if question.batch > 1:
        remarks.append(
            f"batch {question.batch}: closed forms that apply return mixtures of its pictures"
        )
    if question.mjp and model.unk_embed is None:
        remarks.append(
            "asked as an MJP client with an E_unk that was not trained, as in "
            "configs/ladder_vit.yaml"
        )
    elif model.unk_embed is None:
        remarks.append(
            "no patch can be masked; --mjp asks about this model as an MJP client, with an E_unk"
        )
    return remarks


def _values(model: LoadedModel) -> int:
    return model.patch_embed.proj.weight[0].numel()


def _answers(question: ModelQuestion, model: LoadedModel) -> dict[str, str]:
    """By attack: "yes", with what it takes, or "no" and the reason."""
    variants, answers = ModelVariants(model, META), {}
    for name in ATTACKS:
        attack = find_attack(name)
        assert not isinstance(attack, Control)
        cell = Cell(
            model="",
            setting="c" if question.mjp else "a",
            gamma=0.0,
            dtype="float32",
            attack=AttackConfig(name),
            paper_setting=None,
            note=None,
            client=question.client,
        )
        refusal = foreseen(variants, cell, attack, attack.needs)
        takes = []
        if attack.victim == "april_block" and model.first_block == "intact":
            takes.append("of a client that trains a block 0 without norm1 and residuals")
        if attack.uploads > 1:
            takes.append(f"{attack.uploads} uploads of the same picture")
        yes = f"yes, {'; '.join(takes)}" if takes else "yes"
        answers[name] = yes if refusal is None else f"no: {refusal.text}"
    return answers
