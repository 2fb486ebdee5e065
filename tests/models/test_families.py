"""Swins and ResNets under MJP: what is timm's, what is masked, what a jigsaw does, their files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from timm.models.resnet import Bottleneck, ResNet
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model, outline_spec
from mjp_privacy.models.tensor_files import DIGEST_KEY, save_tensors
from mjp_privacy.training.learner import build_network
from mjp_privacy.training.run_files import export_model
from tests.helpers.families import (
    CLASSES,
    GRID,
    MJP_SWIN,
    PATCH,
    SIDE,
    checkpoint,
    family_config,
    network,
)


def pictures() -> Tensor:
    return torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def some_masked() -> Tensor:
    mask = torch.zeros(GRID * GRID, dtype=torch.bool)
    mask[[3, 17, 40]] = True
    return mask


def test_networks_without_a_table_are_timms() -> None:
    swin, resnet = network("swin"), network("resnet", stages=(1, 1, 1, 1))
    of_swin = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 4)}
    theirs = SwinTransformer(SIDE, PATCH, 3, CLASSES, **of_swin)
    other = ResNet(Bottleneck, (1, 1, 1, 1), CLASSES, channels=(16, 32, 64, 128))
    for ours, module in ((swin, theirs), (resnet, other)):
        module.load_state_dict(ours.state_dict(), strict=True)
        assert torch.equal(ours(pictures()), module.eval()(pictures()))
    assert torch.equal(resnet(pictures(), some_masked()), resnet(pictures()))  # nothing to mask
    assert (resnet.unk_embed, resnet.pos_embed) == (None, None)


# masks --------------------------------------------------------------------------------------------


def test_mjp_with_an_empty_mask_is_the_plain_swin_bit_for_bit() -> None:
    masking, plain = network("swin", **MJP_SWIN), network("swin", positions=True)
    shared = dict(plain.named_parameters())
    plain.load_state_dict({n: p for n, p in masking.state_dict().items() if n in shared})
    empty = torch.zeros(GRID * GRID, dtype=torch.bool)
    assert torch.equal(masking(pictures()), plain(pictures()))
    assert torch.equal(masking(pictures(), empty), plain(pictures()))
    assert not torch.equal(masking(pictures(), some_masked()), plain(pictures()))
    assert 0.015 < float(masking.get_parameter("absolute_pos_embed").detach().std()) < 0.025


def test_masked_patches_get_the_unknown_embedding_and_not_their_row() -> None:
    model, mask = network("swin", **MJP_SWIN), some_masked()
    table, unknown = model.get_parameter("absolute_pos_embed"), model.get_parameter("unk_embed")
    added, before = model.positions(mask), model(pictures(), mask)
    assert torch.equal(added[0, mask], unknown[0].expand(3, -1))
    assert torch.equal(added[0, ~mask], table[0, ~mask])
    masks = torch.stack((mask, ~mask))  # each image of a batch may have its own
    both = model(pictures(), masks)
    for place in range(2):
        alone = model(pictures()[place : place + 1], masks[place])
        assert torch.allclose(both[place : place + 1], alone, atol=1e-6)
    for place, same in ((17, True), (18, False)):
        with torch.no_grad():
            table[0, place] += 1
        assert torch.equal(model(pictures(), mask), before) == same


# files --------------------------------------------------------------------------------------------

LEFT_OUT = "left out"


def changed(path: Path, tensors: dict[str, Tensor] | None = None, **metadata: Any) -> Path:
    """The file with other tensors and metadata, as somebody might have edited it."""
    with safe_open(path, "pt") as file:
        before = {name: file.get_tensor(name) for name in file.keys()}
        said = {key: value for key, value in file.metadata().items() if key != DIGEST_KEY}
    said |= {key: json.dumps(value) for key, value in metadata.items()}
    said = {key: value for key, value in said.items() if value != json.dumps(LEFT_OUT)}
    save_tensors(path, {**before, **(tensors or {})}, said)
    return path


@pytest.mark.parametrize(
    ("family", "line"), [("swin", "swin d16 s1-1 h2 p4@32"), ("resnet", "resnet d16 s1-1 p4@32")]
)
def test_a_network_comes_back_as_it_was(tmp_path: Path, family: str, line: str) -> None:
    config = family_config(family, img_size=SIDE)
    before = build_network(config)
    x, mask = torch.rand(4, 3, SIDE, SIDE), torch.rand(64) < 0.3
    before.train()(x)  # a batch norm's statistics move
    path = export_model(tmp_path, before, config, {"val_top1": 50.0})
    model = load_model(checkpoint=path)
    assert torch.equal(model(x, mask), before.eval()(x, mask))
    card = model.card
    assert (card.architecture, model.training) == (line, False)
    assert (card.mean, card.std) == ((0.5,) * 3, (0.25,) * 3)
    assert (card.img_size, card.resize, card.num_classes) == (SIDE, SIDE, 3)
    assert (card.trained_gamma, model.family, model.grid) == (0.5, family, (8, 8))
    outline = outline_model(checkpoint=path)
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    assert [n for n, _ in outline.named_parameters()] == [n for n, _ in model.named_parameters()]


NETWORKS: list[tuple[Any, str]] = [
    (5, "metadata"),
    ({"family": "vit"}, "family"),
    ({"stages": []}, "stages"),
    ({"stages": [512] * 8, "embed_dim": 16_384}, "parameters"),
    ({"embed_dim": "16"}, "embed_dim"),
    ({"num_heads": 3}, "16/3"),
    ({"embed_dim": 32}, "absolute_pos_embed"),
    ({"positions": False}, "unknown_embedding"),
    ({"family": "resnet"}, "position_embedding"),
]


@pytest.mark.parametrize(("network", "said"), NETWORKS)
def test_metadata_that_states_no_or_other_sizes_is_refused(
    tmp_path: Path, network: Any, said: str
) -> None:
    path = checkpoint(tmp_path, "swin")
    with safe_open(path, "pt") as file:
        right = json.loads(file.metadata()["network"])
    wrong = {**right, **network} if isinstance(network, dict) else network
    with pytest.raises(UserError, match=said):
        load_model(checkpoint=changed(path, network=wrong))


def test_mean_and_std_may_be_given_and_nothing_of_the_sizes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "swin")
    assert load_model(checkpoint=path, mean=0.4, std=None).card.mean == (0.4,) * 3
    for given in ({"img_size": 64}, {"unknown_embedding": False}, {"name": "deit_small"}):
        with pytest.raises(UserError, match=str(next(iter(given.values())))):
            load_model(checkpoint=path, **given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="safetensors"):
        outline_spec(checkpoint=path)  # which asks about plain ViTs
    for change, said in (
        ({"bert": torch.zeros(1)}, "bert"),
        ({"head.fc.bias": torch.full((10,), torch.nan)}, "10 of 10"),
    ):
        with pytest.raises(UserError, match=said):
            load_model(checkpoint=changed(checkpoint(tmp_path / said[:4], "swin"), change))
    with pytest.raises(UserError, match="mean=…"):
        load_model(checkpoint=changed(path, mean=LEFT_OUT))


def test_inputs_of_other_shapes_are_refused() -> None:
    """Masks of all wrong shapes are in test_vit."""
    model = network("swin", **MJP_SWIN)
    with pytest.raises(UserError, match="28, 28"):
        model(torch.zeros(1, 3, 28, 28))
    with pytest.raises(UserError, match="64 patches"):
        model(pictures(), torch.zeros(7, dtype=torch.bool))
