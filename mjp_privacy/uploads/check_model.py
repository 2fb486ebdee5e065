"""The work of `mjp check --model`: which attacks apply to a model, before any gradient is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attacks import ATTACKS, find_attack
from attacks.prior.files import SHIPPED
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.experiment.config import AttackConfig, Cell
from mjp_privacy.experiment.refusals import SimulatedForesight
from mjp_privacy.interfaces import Control
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import (
    PACKAGED_PREFIX,
    PYTORCH_SUFFIXES,
    TIMM_PREFIX,
    check_is_there,
)
from mjp_privacy.models.loading import RANDOM
from mjp_privacy.models.outline import outline_model, outline_spec
from mjp_privacy.models.zoo import spec_by_name

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
    _check_client(question, own)
    asked = own
    if question.mjp and own.unk_embed is None:
        masked = {**arguments, "unknown_embedding": True, "unknown_init": "zeros"}
        asked = outline_model(**masked)  # type: ignore[arg-type]
    notes = tuple(_remarks(question, own))
    return ModelAnswer(_described(question, own, heads), notes, _answers(question, asked))


def _check_client(question: ModelQuestion, model: LoadedModel) -> None:
    """Raise a UserError for a batch of no images, or for a parameter that the model lacks."""
    if question.batch < 1:
        raise UserError(f"--batch: expected 1 or more images, got {question.batch}.")
    parameters = [name for name, _ in model.named_parameters()]
    for name in question.withhold:
        if name not in parameters:
            near = did_you_mean(name, parameters, " Such are pos_embed and head.bias.")
            raise UserError(f"--withhold: expected a parameter of the model, got {name!r}.{near}")


def _described(question: ModelQuestion, model: LoadedModel, heads: int | None) -> str:
    patch, width = model.patch_size, model.embed_dim
    return (
        f"{question.model}: N = {model.patch_embed.num_patches} patches of {patch}×{patch} at "
        f"{model.card.img_size} px, width D = {width}, p = {_values(model)} values a patch, "
        f"{len(model.blocks)} blocks, {'heads not known' if heads is None else f'{heads} heads'}, "
        f"{'E_unk (it can mask)' if model.unk_embed is not None else 'no E_unk (it cannot mask)'}"
    )


def _remarks(question: ModelQuestion, model: LoadedModel) -> list[str]:
    """What matters where an attack applies."""
    remarks = []
    patch, width, values = model.patch_size, model.embed_dim, _values(model)
    if width < values:
        remarks.append(
            f"D = {width} < p = {values}: the embedding drops {values - width} directions of a "
            f"patch, so {', '.join(n for n in ATTACKS if 'rank' in ATTACKS[n].traits)} stay below "
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
    foresight = SimulatedForesight.of(model)
    answers = {}
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
        refusal = foresight.refuses(cell, attack, attack.needs)
        takes = []
        if attack.victim == "april_block" and model.first_block == "intact":
            takes.append("of a client that trains a block 0 without norm1 and residuals")
        if attack.uploads > 1:
            takes.append(f"{attack.uploads} uploads of the same picture")
        yes = f"yes, {'; '.join(takes)}" if takes else "yes"
        answers[name] = yes if refusal is None else f"no: {refusal.text}"
    return answers
