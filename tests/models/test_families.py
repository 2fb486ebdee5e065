"""Swins and ResNets under MJP: what is timm's, what is masked, what a jigsaw does, their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.families import build_other
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.loading import outline_model, outline_spec
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.models.tensor_files import DIGEST_KEY, save_tensors
from mjp_privacy.training.learner import build_network
from mjp_privacy.training.puzzles import Puzzle, Puzzles, apply
from mjp_privacy.training.snapshots import export_model
from tests.helpers.families import (
    CLASSES,
    GRID,
    MJP_SWIN,
    PATCH,
    SIDE,
    checkpoint,
    family_config,
    network,
    sizes,
)


def pictures(count: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, SIDE, SIDE, generator=generator)


def some_masked() -> torch.Tensor:
    mask = torch.zeros(GRID * GRID, dtype=torch.bool)
    mask[[3, 17, 40]] = True
    return mask


# timm's networks ----------------------------------------------------------------------------------


def test_a_swin_without_a_table_is_timms() -> None:
    ours = network("swin")
    theirs = SwinTransformer(
        *(SIDE, PATCH, 3, CLASSES), embed_dim=16, depths=(1, 1), num_heads=(2, 4)
    ).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours(pictures()), theirs(pictures()))


def test_a_resnet_is_timms() -> None:
    ours = network("resnet", stages=(1, 1, 1, 1))
    theirs = ResNet(Bottleneck, (1, 1, 1, 1), CLASSES, channels=(16, 32, 64, 128)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(ours(pictures()), theirs(pictures()))


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (Sizes("swin", 224, 4, 96, (2, 2, 6, 2), 1000, num_heads=3), 28_288_354),
        (Sizes("resnet", 224, 16, 64, (3, 4, 6, 3), 1000), 25_557_032),
    ],
)
def test_the_papers_networks_have_their_published_number_of_parameters(
    published: Sizes, parameters: int
) -> None:
    with torch.device("meta"):
        model = build_other(published)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.grid == (56 if published.family == "swin" else 14)


def test_the_start_depends_on_the_seed_alone() -> None:
    one, same, other = (network("swin", seed, **MJP_SWIN) for seed in (0, 0, 1))
    assert all(map(torch.equal, one.parameters(), same.parameters()))
    assert not torch.equal(one.get_parameter("unk_embed"), other.get_parameter("unk_embed"))
    assert 0.015 < float(one.get_parameter("absolute_pos_embed").detach().std()) < 0.025


# masks --------------------------------------------------------------------------------------------


def test_mjp_with_an_empty_mask_is_the_plain_swin_bit_for_bit() -> None:
    masking = network("swin", **MJP_SWIN)
    plain = network("swin", positions=True)
    shared = dict(plain.named_parameters())
    plain.load_state_dict({n: p for n, p in masking.state_dict().items() if n in shared})
    empty = torch.zeros(GRID * GRID, dtype=torch.bool)
    assert torch.equal(masking(pictures()), plain(pictures()))
    assert torch.equal(masking(pictures(), empty), plain(pictures()))
    assert not torch.equal(masking(pictures(), some_masked()), plain(pictures()))


def test_masked_patches_get_the_unknown_embedding_and_not_their_row() -> None:
    model, mask = network("swin", **MJP_SWIN), some_masked()
    table, unknown = model.get_parameter("absolute_pos_embed"), model.get_parameter("unk_embed")
    added = model.positions(mask)
    assert torch.equal(added[0, mask], unknown[0].expand(3, -1))
    assert torch.equal(added[0, ~mask], table[0, ~mask])
    before = model(pictures(), mask)
    with torch.no_grad():
        table[0, 17] += 1
    assert torch.equal(model(pictures(), mask), before)
    with torch.no_grad():
        table[0, 18] += 1
    assert not torch.equal(model(pictures(), mask), before)


def test_each_image_of_a_batch_may_have_its_own_mask() -> None:
    model, mask = network("swin", **MJP_SWIN), some_masked()
    masks = torch.stack((mask, ~mask))
    both = model(pictures(), masks)
    for place in range(2):
        alone = model(pictures()[place : place + 1], masks[place])
        assert torch.allclose(both[place : place + 1], alone, atol=1e-6)
    assert not torch.allclose(both[1:], model(pictures()[1:], mask), atol=1e-4)


def test_a_resnet_has_nothing_to_mask() -> None:
    model = network("resnet")
    assert torch.equal(model(pictures(), some_masked()), model(pictures()))
    assert model.unk_embed is None
    assert model.pos_embed is None


def test_localization_is_that_of_a_vit_with_the_same_table() -> None:
    swin = network("swin", **MJP_SWIN)
    vit = MJPVisionTransformer(
        **{"img_size": SIDE, "patch_size": PATCH, "embed_dim": 16, "depth": 1},
        **{"num_heads": 2, "num_classes": CLASSES, "unknown_embedding": True, "dal": "nonlinear"},
    )
    assert vit.dal_regressor is not None
    assert swin.dal_regressor is not None
    vit.dal_regressor.load_state_dict(swin.dal_regressor.state_dict())
    with torch.no_grad():
        vit.table[:, 1:] = swin.get_parameter("absolute_pos_embed")
    for mask in (None, some_masked(), torch.stack((some_masked(), ~some_masked()))):
        assert torch.allclose(swin.dal_loss(mask), vit.dal_loss(mask))


# the jigsaw ---------------------------------------------------------------------------------------


def test_the_jigsaw_of_a_resnet_moves_patches_and_changes_no_pixel() -> None:
    puzzles = Puzzles(family_config("resnet", img_size=SIDE), 1, torch.device("cpu"))
    puzzle = next(p for p in map(puzzles.at, range(1, 50)) if p.permutation is not None)
    assert puzzle.permutation is not None
    x = pictures()
    shuffled = apply(puzzle, x, PATCH)
    assert not torch.equal(shuffled, x)
    ordered, as_before = (image.flatten(2).sort().values for image in (shuffled, x))
    assert torch.equal(ordered, as_before)
    there = ~puzzle.mask[0]
    assert torch.equal(to_patches(shuffled, PATCH)[:, there], to_patches(x, PATCH)[:, there])
    back = Puzzle(puzzle.mask, puzzle.permutation.argsort(-1))
    assert torch.equal(apply(back, shuffled, PATCH), x)


# mistakes -----------------------------------------------------------------------------------------


def test_inputs_of_other_shapes_are_refused() -> None:
    model = network("swin", **MJP_SWIN)
    with pytest.raises(UserError, match="28, 28"):
        model(torch.zeros(1, 3, 28, 28))
    for mask in (torch.zeros(7, dtype=torch.bool), torch.zeros(64), some_masked().expand(3, -1)):
        with pytest.raises(UserError, match="64 patches"):
            model(pictures(), mask)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("swin", {"unknown_embedding": True}, "unknown_embedding"),
        ("swin", {"dal": "linear"}, "dal"),
        ("resnet", {"positions": True}, "position_embedding"),
        ("swin", {"num_heads": 3}, "32/4 and 16/3"),
        ("resnet", {"stages": (512,) * 8, "embed_dim": 16_384}, "parameters"),
    ],
)
def test_sizes_of_no_network_are_refused(family: str, changes: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sizes(**{**vars(sizes(family)), **changes}).check("it")


LEFT_OUT = "left out"


def changed(path: Path, tensors: dict[str, torch.Tensor], **metadata: Any) -> Path:
    """The file with other tensors and metadata, as somebody might have edited it."""
    with safe_open(path, "pt") as file:
        before = {name: file.get_tensor(name) for name in file.keys()}
        said = {key: value for key, value in file.metadata().items() if key != DIGEST_KEY}
    said |= {key: json.dumps(value) for key, value in metadata.items()}
    said = {key: value for key, value in said.items() if value != json.dumps(LEFT_OUT)}
    save_tensors(path, {**before, **tensors}, said)
    return path


@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_a_network_comes_back_as_it_was(tmp_path: Path, family: str) -> None:
    config = family_config(family, img_size=SIDE)
    before = build_network(config)
    x, mask = torch.rand(4, 3, SIDE, SIDE), torch.rand(64) < 0.3
    before.train()(x)  # a batch norm's statistics move
    path = export_model(tmp_path, before, config, {"val_top1": 50.0})
    model = load_model(checkpoint=path)
    assert torch.equal(model(x, mask), before.eval()(x, mask))
    assert not model.training
    card = model.card
    assert (
        card.architecture
        == {
            "swin": "swin d16 s1-1 h2 p4@32",
            "resnet": "resnet d16 s1-1 p4@32",
        }[family]
    )
    assert (card.mean, card.std) == ((0.5,) * 3, (0.25,) * 3)
    assert (card.img_size, card.resize, card.num_classes) == (SIDE, SIDE, 3)
    assert (card.trained_gamma, model.family, model.grid) == (0.5, family, 8)
    outline = outline_model(checkpoint=path)
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    assert [n for n, _ in outline.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_mean_and_std_may_be_given_and_nothing_of_the_sizes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "swin")
    assert load_model(checkpoint=path, mean=0.4, std=None).card.mean == (0.4,) * 3
    said = "img_size=64|unknown_embedding=False|deit_small"
    for given in ({"img_size": 64}, {"unknown_embedding": False}, {"name": "deit_small"}):
        with pytest.raises(UserError, match=said):
            load_model(checkpoint=path, **given)  # type: ignore[arg-type]


def test_sizes_that_the_tensors_do_not_have_are_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "swin")
    with safe_open(path, "pt") as file:
        network = json.loads(file.metadata()["network"])
    with pytest.raises(UserError, match="absolute_pos_embed"):
        load_model(checkpoint=changed(path, {}, network={**network, "embed_dim": 32}))
    with pytest.raises(UserError, match="bert"):
        load_model(checkpoint=changed(path, {"bert": torch.zeros(1)}, network=network))


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (5, "metadata"),
        ({"family": "vit"}, "family"),
        ({"stages": []}, "stages"),
        ({"embed_dim": "16"}, "embed_dim"),
        ({"num_heads": 3}, "32/4 and 16/3"),
    ],
)
def test_metadata_that_states_no_sizes_is_refused(tmp_path: Path, network: Any, said: str) -> None:
    path = checkpoint(tmp_path, "swin")
    with safe_open(path, "pt") as file:
        right = json.loads(file.metadata()["network"])
    wrong = {**right, **network} if isinstance(network, dict) else network
    with pytest.raises(UserError, match=said):
        load_model(checkpoint=changed(path, {}, network=wrong))


def test_numbers_that_are_nan_and_missing_pixels_are_refused(tmp_path: Path) -> None:
    path = changed(checkpoint(tmp_path, "resnet"), {"fc.bias": torch.full((10,), torch.nan)})
    with pytest.raises(UserError, match="10 of 10"):
        load_model(checkpoint=path)
    path = changed(checkpoint(tmp_path, "resnet"), {}, mean=LEFT_OUT)
    with pytest.raises(UserError, match="mean=…"):
        load_model(checkpoint=path)


def test_what_asks_about_plain_vits_says_that_it_does(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="safetensors"):
        outline_spec(checkpoint=checkpoint(tmp_path, "swin"))
