"""Why an attack cannot be made by a name and options, or does not apply: each reason met, with its
kind and the numbers that it names.

What a missing gradient, a batch of two or a model without positions does is asked of every attack
by tests/contract/test_attacks.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import timm
import torch

from attacks import ATTACKS, CONTROLS, TRAITS, find_attack, traits_of
from attacks.equations.patch_system import too_few_equations
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment.config import AttackConfig, check_attacks
from mjp_privacy.interfaces import AttackerView, Refusal
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.loading import outline_model
from tests.helpers.models import planted_model
from tests.helpers.planted import changed, keeping, other_vit, planted_images, planted_view

Change = Callable[[AttackerView], AttackerView]
Options = Mapping[str, Any]

SMALL = {"img_size": 8}  # N = 4 patches of p = 48 pixels, width D = 96
LARGE = {"img_size": 16, "patch_size": 8, "embed_dim": 48}  # N = 4, p = 192, D = 48
WIDE = LARGE | {"embed_dim": 128}
TABLE = torch.nn.Parameter(torch.zeros(1, 1, 96))
MATCHING = ("inverting_gradients", "april_optimization", "gradvit", "span_matching")


def in_model(name: str, part: Any) -> Change:
    """The view, in whose model something else stands: in_model("blocks.0.norm1", part)."""

    def change(view: AttackerView) -> AttackerView:
        where, _, last = name.rpartition(".")
        setattr(view.model.get_submodule(where), last, part)
        return view

    return change


def with_facts(**facts: Any) -> Change:
    return lambda view: changed(view, **facts)


def unlabelled(view: AttackerView) -> AttackerView:
    return replace(keeping(view, lambda name: name != "head.bias"), labels=None)


def fresh_and_masked(view: AttackerView) -> AttackerView:
    """Two of the four positions are masked in all pictures."""
    grads = {name: sent.clone() for name, sent in view.updates[0].grads.items()}
    grads["pos_embed"][:, :, 1:3] = 0
    return changed(view, grads=grads, partners="fresh")


DIFFERENCE = {"kind": "weight_difference", "lr": 0.1}
as_sent, difference, fresh = with_facts(), with_facts(**DIFFERENCE), with_facts(partners="fresh")


@dataclass(frozen=True)
class Case:
    """An attack on an upload that it cannot read, the refusal's kind, and what its text names."""

    attack: str
    kind: str
    named: str = ""
    batch: int = 1
    model: Options = field(default_factory=dict)
    change: Change = as_sent
    options: Options = field(default_factory=dict)
    network: Callable[[], LoadedModel] | None = None  # in place of the planted model

    def __str__(self) -> str:
        return f"{self.attack}-{self.kind}-{self.named[:30]}"


class Doubled(torch.nn.Identity):
    """In place of a norm, what is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class OneLayer(torch.nn.Linear):
    """In place of two layers."""

    def __init__(self, in_features: int, **_: Any) -> None:
        super().__init__(in_features, in_features)


def unscaled() -> LoadedModel:
    """A network whose patches are embedded without a bias and normalised, and get no positions."""
    more = {"pos_embed": "none", "embed_norm_layer": timm.layers.RmsNorm}
    network = other_vit(**more)
    network.patch_embed.proj.bias = None
    return network


FEW = "underdetermined"
CASES = (
    *(Case(name, "labels", batch=2, model=SMALL, change=unlabelled) for name in MATCHING),
    *(Case(n, "weight_difference", model=SMALL, change=difference) for n in (*MATCHING, "april")),
    Case("inverting_gradients", "missing_gradient", change=with_facts(grads={})),
    *(
        Case("patch_gradient", "weight_difference", named, change=with_facts(**DIFFERENCE | facts))
        for named, facts in (
            ("2 AdamW steps", {"optimizer": "adamw", "steps": 2}),
            ("lion", {"optimizer": "lion"}),
            ("learning rate", {"lr": None}),
        )
    ),
    Case("april", "model", "distillation", change=in_model("dist_token", TABLE)),
    Case("april", "model", "index table", change=in_model("index_embed", TABLE)),
    Case("april", FEW, "N + 1 = 65 unknowns > D = 48", model={"embed_dim": 48}),
    Case(
        *("april", "model", "bias"),
        change=in_model("patch_embed.proj.bias", None),
        options={"engine": "breaching"},
    ),
    Case("april_unk_aware", "unknown_embedding"),
    Case("pixel_lattice", "unknown_embedding"),
    Case("patch_lattice", FEW, "N = 64 patches, and a lattice of 48", options={"most": 48}),
    Case("token_span", "block", model={"first_block": "closed_form"}),
    Case("token_span", "block", change=in_model("blocks.0.norm1", torch.nn.Identity())),
    Case("token_span", "block", "ln_pre", change=in_model("norm_pre", torch.nn.LayerNorm(96))),
    Case("token_span", FEW, "N + 3 = 67 unknowns > D = 64", model={"embed_dim": 64}),
    Case("multi_round", "uploads", "4 uploads", model={"embed_dim": 20}, options={"uploads": 3}),
    Case("multi_round", FEW, batch=2, model={"embed_dim": 20}),
    Case("token_peeling", "block", network=partial(other_vit, norm_layer=Doubled)),
    Case("token_peeling", "block", network=partial(other_vit, mlp_layer=OneLayer)),
    Case("token_peeling", "model", network=unscaled),
    Case(
        *("token_peeling", "missing_gradient", "88 values"),  # D - 8; a patch has 192
        change=lambda view: keeping(view, lambda name: "patch_embed" not in name),
        network=partial(other_vit, pre_norm=True),
    ),
    Case("token_peeling", "model", model={"unknown_embedding": True, "index_embedding": True}),
    Case("token_peeling", FEW, change=with_facts(batch=100)),
    # N B <= 96 allows 24, N (B - 1) < 48 twelve
    Case("batch_span", FEW, "N (B - 1) = 60 differences >= p = 48", batch=16, model=SMALL),
    Case("batch_span", FEW, "N B = 128 patches > D = 96", batch=32, model=SMALL),
    Case("batch_span", FEW, "no batch of this model", batch=2),
    Case("span_matching", FEW, "N B = 128 patches", batch=32, model=SMALL),
    Case("layer_span", FEW, "50 tokens of a batch >= D = 48", 10, SMALL | {"embed_dim": 48}),
    Case("layer_span", FEW, "up to 62 patches", model={"embed_dim": 64}),
    Case("layer_span", FEW, "up to 14 patches", model={"embed_dim": 16}),  # not 4 x 4
    Case("batch_lattice", FEW, "12 differences > 10", 4, LARGE, options={"most": 10}),
    Case("batch_lattice", FEW, "12 differences >= p = 12", 4, {"img_size": 4, "patch_size": 2}),
    Case("batch_lattice", FEW, "= 1 * 15", 2, LARGE | {"img_size": 32, "embed_dim": 32}),
    Case("head_features", FEW, "10 classes", batch=12),
    Case("shared_picture", "batch", "client.partners: fresh", 4, LARGE),
    Case("shared_picture", "uploads", "one", 4, LARGE, fresh, {"uploads": 1}),
    Case("shared_picture", FEW, "4 * 12 = 48 patches >= D = 48", 12, LARGE, fresh),
    # N (B - 1) = 100 of p = 192: two uploads leave 184 equations
    Case("shared_picture", FEW, "2 * (192 - 4 * 25) = 184 equations <= p", 26, WIDE, fresh),
    Case("shared_picture", FEW, "- 2 masked) = 188 equations", 25, WIDE, fresh_and_masked),
)


def refusal_of(case: Case) -> Refusal | None:
    attack = find_attack(case.attack, dict(case.options))
    model = case.network() if case.network else planted_model(**case.model)
    images = planted_images(max(4, case.batch), model.card.img_size)
    client = ClientConfig(batch=case.batch)
    view, _ = planted_view(model, attack, "a", images=images, client=client)
    return attack.unsupported(case.change(view))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_reason_is_given(case: Case) -> None:
    reason = refusal_of(case)
    assert reason is not None
    assert (reason.kind, case.named in reason.text) == (case.kind, True), reason.text


def test_more_uploads_tell_what_two_do_not() -> None:
    assert refusal_of(Case("shared_picture", "", "", 26, WIDE, fresh, {"uploads": 3})) is None


# the inequality that closed forms need, and the way out -------------------------------------------


def outline(size: int, patch: int, width: int) -> Any:
    shape = {"img_size": size, "patch_size": patch, "embed_dim": width}
    return outline_model(checkpoint="random", depth=1, num_heads=1, num_classes=2, **shape)


@pytest.mark.parametrize("width", [16, 17, 24, 25, 100])
def test_the_largest_size_is_the_largest_that_is_not_refused(width: int) -> None:
    sizes = [s for s in range(8, 121, 8) if too_few_equations(outline(s, 8, width)) is None]
    assert f"up to {max(sizes)} px" in str(too_few_equations(outline(120, 8, width)))


# options of the wrong type or size ----------------------------------------------------------------

OF_BATCHES = ("layer_span", "token_peeling", "span_matching", "shared_picture", "head_features")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("multi_round", {"uploads": 0}, "uploads"),
        ("multi_round", {"upload": 6}, "uploads"),
        ("masked_span", {"uploads": 6}, "uploads"),
        ("masked_span", {"completion": "fields"}, "field"),
        ("multi_round", {"uploads": True}, "uploads"),
        ("multi_round", {"uploads": "5"}, "uploads"),
        ("masked_span", {"prior": b"5"}, "prior"),
        ("gradvit", {"registration": 1}, "registration"),
        ("gradvit", {"tv": float("nan")}, "tv"),
        ("april_optimization", {"positions": 0}, "positions"),
        ("gradvit", {"step_size": 0}, "step_size"),
        ("gradvit", {"image_prior": "resnet.pth"}, "resnet.pth"),
        ("mean_imag", {}, "mean_image"),
    ],
)
def test_a_wrong_option_or_name_is_named(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        find_attack(name, options)
    assert said in str(error.value)
    assert len(str(error.value)) < 600


def test_every_option_of_every_attack_is_held_to_its_type() -> None:
    for name in ATTACKS:
        for option in dataclasses.fields(find_attack(name)):
            with pytest.raises(UserError, match=option.name):
                find_attack(name, {option.name: object()})


def test_traits_are_explained_used_and_agree_with_the_code() -> None:
    """An attack that optimises has steps, and one with a prior needs photographs."""
    assert {trait for name in ATTACKS for trait in traits_of(name)} == set(TRAITS)
    for name in ATTACKS:
        attack: Any = find_attack(name)
        assert ("steps" in traits_of(name)) == hasattr(attack, "steps"), name
        prior = hasattr(attack, "prior") or hasattr(attack, "image_prior")
        assert ("public photographs" in traits_of(name)) >= prior, name
        assert ("batches" in traits_of(name)) == ("batch" in name or name in OF_BATCHES), name
    assert all(traits_of(name) == frozenset() for name in (*CONTROLS, "of tomorrow", ""))


# attacks of one's own -----------------------------------------------------------------------------

CLASS = "@dataclass\nclass Mine:\n"
WHOLE = """
from typing import ClassVar
from mjp_privacy.interfaces import Usual

@dataclass(frozen=True)
class Mine(Usual):
    sizes: tuple[int, ...] = (1,)
    weights: dict[str, float] | None = None
    name: ClassVar[str] = "mine"
    def needs(self, model): return ()
    def unsupported(self, view): return None
    def run(self, view, *, generator): return None
"""


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("def broken(:\n", {}, "SyntaxError"),
        ("import no_such_package\n", {}, "no_such_package"),
        ("Yours = 5\n", {}, "Mine"),
        ("class Mine: pass\n", {}, "dataclass"),
        (CLASS + "    size: int\n", {}, "TypeError"),
        (CLASS + "    def __post_init__(self): raise KeyError('no table')\n", {}, "no table"),
        (CLASS + "    name = 'mine'\n", {}, "published, victim, uploads, needs, unsupported, run"),
        (WHOLE, {"szes": [1]}, "sizes"),
        (WHOLE, {"sizes": [1, "2"]}, "[1, '2']"),
        (WHOLE, {"sizes": [True]}, "[True]"),
        (WHOLE, {"weights": {"a": float("nan")}}, "weights"),
        (WHOLE, {"sizes": [1, 2], "weights": {"a": 1}}, None),
        (WHOLE, {"weights": None}, None),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    options: dict[str, Any],
    said: str | None,
) -> None:
    module = f"own_{abs(hash((str(tmp_path), source)))}"
    (tmp_path / f"{module}.py").write_text("from dataclasses import dataclass\n" + source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with patch.dict(ATTACKS, {"mine": Entry(f"{module}:Mine")}):
        if said is None:
            attack: Any = find_attack("mine", options)
            assert {key: getattr(attack, key) for key in options} == options
            return
        with pytest.raises(UserError) as caught:
            check_attacks([AttackConfig("mine", options)], "c.yaml")
    message = str(caught.value)
    assert message.startswith("c.yaml, attacks.0: ")
    assert said in message
    assert str(tmp_path) not in message
