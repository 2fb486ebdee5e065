"""Low-rank adapters: what the network computes, how they start, and that a file keeps them."""

from pathlib import Path

import pytest
import torch

from mjp_privacy import load_model
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.adapters import with_adapters
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.sizes import LowRank, low_rank
from mjp_privacy.uploads.record import save_weights
from tests.helpers.models import some_images, tiny

BOTH = LowRank(4, ("qkv", "fc2"), alpha=6.0, spread=0.3)


def merged(adapted: LoadedModel) -> LoadedModel:
    """The plain model whose weights are W + (alpha / rank) B A, written out."""
    plain = tiny()
    parameters = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(parameters[name])
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in parameters:
                first = parameters[f"{layer}.lora_A.weight"]
                weight.add_(6.0 / 4 * parameters[f"{layer}.lora_B.weight"] @ first)
    return plain


def test_an_adapter_adds_its_product_to_the_weight() -> None:
    adapted, images = with_adapters(tiny(), BOTH, seed=0), some_images(3)
    assert (adapted(images) - tiny()(images)).abs().max() > 0.01
    torch.testing.assert_close(adapted(images), merged(adapted)(images))


def test_adapters_start_as_pefts_do() -> None:
    """B is zero, so that nothing changes at first; A is uniform within 1 / sqrt(in)."""
    model, images = tiny(), some_images(2)
    adapted = with_adapters(model, LowRank(4, ("qkv", "proj", "fc1", "fc2")), seed=0)
    assert torch.equal(adapted(images), model(images))
    new = dict(adapted.named_parameters()).keys() - dict(model.named_parameters()).keys()
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert new == {
        f"blocks.{block}.{layer}.lora_{side}.weight"
        for block in range(2)
        for layer in layers
        for side in "AB"
    }
    first = adapted.get_parameter("blocks.0.mlp.fc2.lora_A.weight")
    assert first.shape == (4, 96)
    bound = 96**-0.5
    assert 0.9 * bound < first.abs().max() <= bound
    assert float(first.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_adapters_are_drawn_for_the_seed_and_the_layer_alone() -> None:
    name = "blocks.1.attn.qkv.lora_A.weight"
    drawn = with_adapters(tiny(), LowRank(4), seed=1).get_parameter(name)
    others = with_adapters(tiny(), BOTH, seed=1)
    assert torch.equal(drawn, others.get_parameter(name))
    assert not torch.equal(drawn, with_adapters(tiny(), LowRank(4), seed=2).get_parameter(name))
    assert not torch.equal(drawn, others.get_parameter(name.replace("1", "0")))
    single = with_adapters(tiny(torch.float32), LowRank(4), seed=1).get_parameter(name)
    assert torch.equal(single, drawn.float())


def test_a_file_of_weights_keeps_its_adapters(tmp_path: Path) -> None:
    adapted = with_adapters(tiny(torch.float32), BOTH, seed=0)
    path = tmp_path / "weights.safetensors"
    save_weights(path, adapted)
    loaded = load_model(checkpoint=path)
    images = some_images(2).float()
    assert loaded.adapters == BOTH
    assert torch.equal(loaded(images), adapted(images))
    outline = outline_model(checkpoint=path)
    assert [name for name, _ in outline.named_parameters()] == [
        name for name, _ in adapted.named_parameters()
    ]


def test_adapters_that_are_not_stated_are_no_plain_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    adapted = with_adapters(tiny(torch.float32), LowRank(4), seed=0)
    path = tmp_path / "weights.safetensors"
    tensors = {name: p.detach().contiguous() for name, p in adapted.named_parameters()}
    save_file(tensors, path, {"mean": "0.5", "std": "0.5", "num_heads": "3"})
    with pytest.raises(UserError, match="lora_A"):
        load_model(checkpoint=path)


def test_a_model_that_was_fine_tuned_keeps_its_adapters() -> None:
    tuned = with_adapters(tiny(), BOTH, seed=0)
    again = with_adapters(tuned, LowRank(4, ("qkv", "fc2"), alpha=6.0), seed=5)
    assert all(
        torch.equal(one, other)
        for one, other in zip(again.parameters(), tuned.parameters(), strict=True)
    )
    with pytest.raises(UserError, match=r"alpha: 6\.0.*rank: 2"):
        with_adapters(tuned, LowRank(2), seed=0)


def test_a_rank_above_the_layers_smaller_side_is_refused() -> None:
    with pytest.raises(UserError, match=r"rank: .*24.*blocks.0.attn.qkv.weight.*25"):
        with_adapters(tiny(), LowRank(25), seed=0)


@pytest.mark.parametrize("adapters", [LowRank(1), BOTH, LowRank(2, ("proj",), head=False)])
def test_the_line_of_text_comes_back(adapters: LowRank) -> None:
    assert low_rank(adapters.text) == adapters


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rank 4", "'rank 4'"),
        ({"targets": ["qkv"]}, "rank"),
        ({"rank": 4, "targets": ["query"]}, "'query'"),
        ({"rank": 4, "targets": ["qkv", "qkv"]}, "qkv, qkv"),
        ({"rank": 4, "target": ["qkv"]}, "targets?"),
    ],
)
def test_a_mistake_is_named(given: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        low_rank(given)
    assert words in str(caught.value)
