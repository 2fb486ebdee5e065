"""Attacks and controls, found by name.

To add one, copy `patch_gradient.py`, register the copy below, and try it on planted pictures:

    _attack("yours", "yours:Yours", "what it does")
    python -m pytest tests/contract -k yours

`run` gets tensors of shape (n, *parameter.shape), one for each of n client steps, and returns the
m = n B images of all steps; what uploads lack, `unsupported` refuses (`lacks_gradients`). A config
names it under `attacks:`, where fields are options, checked against their types.
Controls (`interfaces.Control`) are registered and run the same way.

Attacks that search ask `budget.spent()`, and then give the best so far.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mjp_privacy.core.errors import UserError, format_error
from mjp_privacy.core.registry import Entry, Registry, unknown_name
from mjp_privacy.core.text import shown

if TYPE_CHECKING:
    from mjp_privacy.interfaces import Attack, Control

__all__ = ["ATTACKS", "CONTROLS", "TRAITS", "find_attack", "lacks_parts", "traits_of"]

ATTACKS: Registry[Entry] = Registry("attack")
CONTROLS: Registry[Entry] = Registry("control")


TRAITS: Mapping[str, str] = {
    "masks": "knows MJP: masked positions, the unknown embedding, unshuffled steps",
    "noise": "weighs the errors that a client's defence is known to add",
    "rank": "inverts the patch embedding by minimum norm: the rank ceiling bounds it",
    "8 bit": "takes pixels for multiples of 1/255",
    "steps": "optimises in steps, and may stop before it has converged",
    "patches": "reads a ViT's patches, positions or first layers, so it meets any of timm's",
    "any network": "reads no part of a ViT, so it meets a Swin or a ResNet as well",
    "batches": "is made for batches of several pictures",
    "shared pictures": "finds the pictures that uploads of other batches share",
    "public photographs": "has a prior fitted on photographs that are not the client's",
    "shuffled alone": "sorts the pictures of clients that shuffle patches and mask none",
    "unshuffled uploads": "waits for an upload in which nothing was shuffled",
    "no picture": "names masked positions and makes no picture",
    "single as another": "takes a single picture as another attack does, and is of use for batches",
}
"""What a reader of an attack's results must know; its class declares which hold, as `traits`, and
reports flag figures by it."""


def _attack(name: str, where: str, summary: str) -> None:
    ATTACKS.register(name, Entry(f"attacks.{where}", summary))


def _control(name: str, where: str, summary: str) -> None:
    CONTROLS.register(name, Entry(f"attacks.{where}", summary))


# in the order of their cost, in which `attack_gradients` runs them; a run begins with the dearest
_attack(
    "patch_gradient", "patch_gradient:PatchGradient", "solves two gradients of the intact model"
)
_attack(
    "mask_locator", "patch_variants:MaskLocator", "finds the masked positions, makes no picture"
)
_attack("plain_step", "patch_variants:PlainStep", "waits for a step that MJP left unshuffled")
_attack(
    "patch_jigsaw",
    "patch_variants:PatchJigsaw",
    "patch_gradient of clients that shuffle and mask none, sorted by borders and other uploads",
)
_attack("april", "april:April", "the published closed form; needs a client with an altered block 0")
_attack("april_unk_aware", "april:UnknownAwareApril", "april, knowing MJP's unknown embedding")
_attack("april_prior", "april:AprilPrior", "april's equations with a picture prior")
_attack("patch_prior", "patch_variants:PatchPriorAttack", "patch_gradient with a prior, for noise")
_attack(
    "patch_integers",
    "patch_variants:PatchIntegers",
    "patch_gradient of more patches than the width, in levels of 8 bits",
)
_attack(
    "masked_span", "masked_span:MaskedSpan", "knows MJP: span of the masked patches, and a prior"
)
_attack(
    "head_features",
    "head_features:HeadFeatures",
    "the classifier's gradient alone: each picture's feature, and a picture that has it",
)
_attack(
    "multi_round",
    "masked_span:MultiRound",
    "masked_span on several uploads of the same pixels: their spans intersect",
)
_attack(
    "shared_picture",
    "shared_picture:SharedPictures",
    "pictures that batches of several uploads share, whatever stood beside them",
)
_attack(
    "batch_span",
    "batch_span:BatchSpanAttack",
    "one upload of a batch: all but the span of its pictures' differences, and a prior",
)
_attack(
    "token_peeling",
    "layer_span:TokenPeeling",
    "one upload: every token out of block 0's gradients, masked or not, with or without positions",
)
_attack(
    "layer_span",
    "layer_span:LayerSpan",
    "one upload of a batch, picture by picture: layers' inputs lie in their gradients' row spaces",
)
_attack(
    "batch_lattice",
    "layer_span:BatchLattice",
    "uploads of one batch of 8-bit pictures: all of them, by the lattice of their differences",
)
_attack("pixel_lattice", "masked_span:PixelLattice", "masked_span on 8-bit pixels, by a lattice")
_attack("token_span", "masked_span:TokenSpan", "needs no gradient of the position embeddings")
_attack(
    "patch_lattice",
    "masked_span:PatchLattice",
    "one upload without positions' gradient: all patches by a lattice, placed by their borders",
)
_attack(
    "span_matching",
    "batch_span:SpanMatching",
    "one upload of a batch: gradient matching in the span that batch_span leaves open",
)
_attack(
    "inverting_gradients",
    "gradient_matching:GradientMatching",
    "gradient matching as breaching runs it",
)
_attack(
    "april_optimization",
    "gradient_matching:AprilOptimization",
    "inverting_gradients with a term for the position embeddings",
)
_attack(
    "gradvit",
    "gradient_matching:GradViT",
    "gradient matching with image terms and the consensus of several seeds",
)

_control("grey", "controls:Grey", "floor: every pixel 0.5")
_control("mean_image", "controls:MeanImage", "floor: the mean colour of photographs")
_control("other_image", "controls:OtherImage", "floor: another image of the same block")
_control("oracle_inverse", "controls:OracleInverse", "ceiling: the true embeddings, inverted")

NOT_A_VIT = {
    "timm": "it is written for the blocks of timm's plain ViT, and this is another network",
    "swin": "it reads a plain ViT's patch embedding and positions: a Swin normalises its "
    "embedded patches before any position is added, so that the gradients of its table and of its "
    "patch embedding are no linear system in the patches",
    "resnet": "it reads a plain ViT's patch embedding and positions: a ResNet has no patch "
    "embedding and no position embeddings",
}
"""Why what reads the parts of a ViT has nothing to read in networks of another family."""

MEMBERS = ("name", "published", "victim", "uploads", "needs", "unsupported", "run")
CONTROL_MEMBERS = ("name", "role", "run")


def find_attack(name: str, options: dict[str, Any] | None = None) -> Attack | Control:
    """Build the attack or control called `name`; raise UserError where name or options are wrong.

    find_attack("multi_round", {"uploads": 3})
    """
    if name not in ATTACKS and name not in CONTROLS:
        raise unknown_name("attack", name, [*ATTACKS, *CONTROLS])
    entry = (CONTROLS if name in CONTROLS else ATTACKS)[name]
    attack = _build(name, entry, options or {})
    members = CONTROL_MEMBERS if name in CONTROLS else MEMBERS
    if missing := [member for member in members if not hasattr(attack, member)]:
        raise UserError(
            f"Attack {name}: {entry.where} lacks {', '.join(missing)}. Expected "
            f"{', '.join(members)}, as `mjp_privacy.interfaces` describes them; declare a value "
            "that is not an option as a ClassVar."
        )
    return attack


def traits_of(name: str) -> frozenset[str]:
    """The traits that an attack's class declares; none where it is not registered (any more)."""
    if name not in ATTACKS:
        return frozenset()
    return frozenset(getattr(_loaded(name, ATTACKS[name]), "traits", ()))


def lacks_parts(name: str, family: str) -> str | None:
    """Why an attack has nothing to read in networks of this family (`models.loading`), or None.

    lacks_parts("april", "timm") says that it is written for the plain ViT's blocks
    """
    reads = traits_of(name)
    if family == "vit" or "any network" in reads or (family == "timm" and "patches" in reads):
        return None
    return NOT_A_VIT[family]


def _build(name: str, entry: Entry, options: dict[str, Any]) -> Attack | Control:
    """Build the attack, once its options are known and of their types."""
    cls = _loaded(name, entry)
    offered = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "name"]
    for option, value in options.items():
        if option not in offered:
            raise UserError(f"Attack {name}: {unknown_name('option', option, offered)}")
        try:
            _check_type(_type_of(cls, option), value)
        except ValidationError as error:
            mistake = error.errors()[0]["msg"].replace("Input should", "must")
            raise UserError(
                f"Attack {name}, option {option}: {mistake}; got {shown(repr(value), 100)}."
            ) from error
    try:
        attack: Attack | Control = cls(**options)
    except UserError:
        raise
    except Exception as error:  # an attack of anybody's may raise anything
        raise UserError(
            f"Attack {name}: expected it to be made with the options {shown(options)}; got "
            f"{format_error(error)}. Give other options, or mend its code."
        ) from error
    return attack


def _loaded(name: str, entry: Entry) -> Any:
    """The attack's class; UserError where its file cannot be imported or holds no dataclass."""
    try:
        cls = entry.load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"Attack {name}: expected {entry.where} to be imported; got {format_error(error)}. "
            "Mend that file, or install what it needs."
        ) from error
    if not dataclasses.is_dataclass(cls):
        raise UserError(
            f"Attack {name}: expected {entry.where} to be a dataclass, whose fields are its "
            "options; got another object. Write @dataclass(frozen=True) above it."
        )
    return cls


EXACT = ConfigDict(strict=True, allow_inf_nan=False)


def _check_type(kind: Any, value: Any) -> None:
    """Raise pydantic's ValidationError unless the value is of this type, as JSON has types: true is
    no number, "5" is not 5, nothing is NaN, and a list may stand for a tuple."""
    try:
        adapter = TypeAdapter(kind, config=EXACT)
    except Exception as error:  # a dataclass, which has a config of its own, or no type for data
        if not getattr(error, "code", "").startswith("type-adapter-config"):
            return
        adapter = TypeAdapter(kind)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # what no file holds, such as a date or a tensor
        adapter.validate_python(value, strict=True)
        return
    adapter.validate_json(text, strict=True)


def _type_of(cls: Any, option: str) -> Any:
    """The type of one field. It is resolved alone, because the annotations of other fields may
    name what is imported for type checkers only."""
    owner = next(base for base in cls.__mro__ if option in get_annotations(base))
    annotation = {option: get_annotations(owner)[option]}
    body = {"__module__": owner.__module__, "__annotations__": annotation}
    return get_type_hints(type(owner.__name__, (), body), include_extras=True)[option]
