"""Layouts: which names tell one, and which attack applies to which library's networks."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mjp_privacy.models
from attacks import ATTACKS, find_attack
from mjp_privacy.core.errors import UserError
from mjp_privacy.metrics.pictures import psnr
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import LAYOUTS, recognised
from mjp_privacy.models.live.modules import load_module
from tests.helpers.libraries import SOURCES, randomised
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view, solved

OLD_BLOCK = "vit.encoder.layer.3."


NAMES = {
    "official_mjp": ("pos_embed.weight", "dlocr.layers.0.weight", "module.pos_embed.weight"),
    "timm": ("cls_token", "blocks.11.attn.qkv.bias", "model.patch_embed.proj.weight", "pos_embed"),
    "torchvision": ("class_token", "conv_proj.bias", "encoder.layers.encoder_layer_1.ln_1.bias"),
    "hf_deit": ("deit.embeddings.cls_token", "embeddings.distillation_token"),
    "hf_vit": (
        "embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.layers.0.attention.q_proj.weight",
        f"{OLD_BLOCK}attention.attention.query.weight",
        f"module.{OLD_BLOCK}layernorm_before.bias",
    ),
    "hf_clip": ("vision_model.pre_layrnorm.weight", "embeddings.class_embedding"),
    "open_clip": ("visual.class_embedding", "positional_embedding", "module.visual.ln_pre.bias"),
}


@pytest.mark.parametrize(("layout", "name"), [(k, n) for k, names in NAMES.items() for n in names])
def test_one_name_tells_the_layout(layout: str, name: str) -> None:
    assert recognised([name]).name == layout


def test_names_that_are_unknown_fit_no_layout_or_mean_the_same() -> None:
    for names, unknown in (  # poolers and text towers stand beside
        (["vit.embeddings.cls_token", "vit.pooler.dense.weight", "vit.embeddings.mask_token"], []),
        (["vision_model.embeddings.class_embedding", "text_model.ln.bias", "x"], ["x"]),
        (["visual.class_embedding", "transformer.resblocks.0.ln_1.bias", "visual.q"], ["visual.q"]),
        (["module.conv_proj.bias", "heads.pre_logits.bias"], ["heads.pre_logits.bias"]),
    ):
        assert recognised(names).unknown(names) == unknown
    for names in ([], ["conv1.weight"], ["bert.encoder.layer.0.attention.self.query.weight"]):
        with pytest.raises(UserError) as error:
            recognised(names)
        assert all(word in str(error.value) for word in names)
        assert all(layout.title in str(error.value) for layout in LAYOUTS)
    both = {"cls_token": torch.zeros(1), "module.cls_token": torch.ones(1)}
    with pytest.raises(UserError, match=r"'cls_token' and 'module.cls_token'"):
        recognised(both).to_own(both)


def test_a_key_that_fits_no_query_is_refused_and_one_that_is_absent_joins_nothing() -> None:
    names = [f"vit.layers.0.attention.{part}_proj.bias" for part in "qkv"]
    parts = {name: torch.zeros(5 if "k_proj" in name else 4) for name in names}
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.qkv\.bias"):
        recognised(parts).to_own(parts)
    del parts[names[1]]
    assert not recognised(parts).to_own(parts)


# which attacks apply ------------------------------------------------------------------------------

README = Path(mjp_privacy.models.__file__).parent / "README.md"
BEGIN, END = "<!-- attacks:begin -->", "<!-- attacks:end -->"
NETWORKS = {  # one of each layout
    "official_mjp": "MJP",
    "timm": "timm",
    "torchvision": "torchvision",
    "hf_vit": "ViT",
    "hf_deit": "DeiT",
    "hf_clip": "CLIP of transformers",
    "open_clip": "open_clip's tower",
}
REASONS = {  # a refusal's kind, and the words that stand for it in the table
    "unknown_embedding": "without MJP",
    "missing_gradient": "no bias",
    "block": "ln_pre",
    "model": "distillation token",
}


@cache
def network(layout: str) -> LoadedModel:
    if layout == "official_mjp":
        return planted_model(unknown_embedding=True)
    return load_module(randomised(SOURCES[NETWORKS[layout]].build()), mean=0.5, std=0.5).double()


def refused(layout: str) -> str:
    """The attacks that refuse an upload of the layout's network, by why: `a`, `b` (reason)."""
    reasons: dict[str, list[str]] = {}
    for name in ATTACKS:
        attack: Any = find_attack(name)
        view, _ = planted_view(network(layout), attack, "a", images=torch.zeros(1, 3, 32, 32))
        refusal = attack.unsupported(view)
        if refusal is not None:
            reasons.setdefault(REASONS[refusal.kind], []).append(f"`{name}`")
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) or "–"


def test_readme_prints_what_the_attacks_say() -> None:
    """Layouts that the same attacks refuse stand together."""
    assert NETWORKS.keys() == {layout.name for layout in LAYOUTS}
    titles: dict[str, list[str]] = {}
    for layout in LAYOUTS:
        titles.setdefault(refused(layout.name), []).append(layout.title)
    rows = (f"| {'; '.join(same)} | {which} |" for which, same in titles.items())
    expected = "\n".join(["| layout | does not apply |", "|---|---|", *rows])
    printed = README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert printed == expected, f"expected this table in {README.name}:\n{expected}"


def test_a_masked_upload_of_clip_does_without_block_0() -> None:
    """A network as CLIP's has no equations of block 0 that masked_span could use."""
    model = planted_model(img_size=16, unknown_embedding=True, pre_norm=True)
    view, inputs = planted_view(model, find_attack("masked_span"), "b")
    pictures = [solved(view, "masked_span", tokens=tokens).images for tokens in (True, False)]
    (used, unused), fed = pictures, inputs.images
    assert torch.equal(used, unused)
    assert bool((psnr(unused, fed) > psnr(torch.full_like(fed, 0.5), fed) + 2).all())


@pytest.mark.parametrize(
    "variant", [{"pre_norm": True, "patch_bias": False}, {"distillation_token": True}]
)
def test_several_masked_uploads_of_clip_and_deit_are_exact(variant: dict[str, bool]) -> None:
    model, images = planted_model(unknown_embedding=True, **variant), planted_images(1)
    view, _ = planted_view(model, find_attack("multi_round", {"uploads": 8}), "c", images=images)
    assert psnr(solved(view, "multi_round", uploads=8).images, images).min() > 99
