"""Checkpoints of Swins and ResNets: written, read back, and refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model, outline_spec
from mjp_privacy.models.tensor_files import DIGEST_KEY, save_tensors
from mjp_privacy.training.learner import build_network
from mjp_privacy.training.snapshots import export_model
from tests.helpers.families import SIDE, checkpoint, family_config

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
