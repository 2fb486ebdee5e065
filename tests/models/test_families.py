"""Swins and ResNets under MJP: what is timm's, what is masked, and what a jigsaw does."""

import pytest
import torch
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.families import build_other
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.mjp_vit import MJPVisionTransformer
from mjp_privacy.models.sizes import Sizes
from mjp_privacy.training.puzzles import Puzzle, Puzzles, apply
from tests.helpers.families import (
    CLASSES,
    GRID,
    MJP_SWIN,
    PATCH,
    SIDE,
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
