"""Live networks of other libraries: the same outputs and gradients here, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.layouts import recognised
from mjp_privacy.models.modules import load_module
from mjp_privacy.models.timm_networks import TimmNetwork
from tests.helpers.libraries import (
    SIDE,
    SOURCES,
    Source,
    hugging_face,
    library,
    open_clip_model,
    open_clip_tower,
    randomised,
    timm_vit,
    torchvision_vit,
)
from tests.helpers.models import tiny

EXACT = 1e-5
each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))


def loaded(module: nn.Module, **facts: Any) -> LoadedModel:
    return load_module(module, **{"mean": 0.5, "std": 0.5, **facts})


def pictures(side: int = SIDE, number: int = 2) -> Tensor:
    return torch.randn(number, 3, side, side, generator=torch.Generator().manual_seed(5))


def assert_equal(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal to 1e-5 of the largest number."""
    assert found.shape == expected.shape, name
    with torch.no_grad():
        assert float((found - expected).abs().max()) <= EXACT * float(expected.abs().max()), name


def gradients(parameters: dict[str, nn.Parameter], outputs: Tensor) -> dict[str, Tensor]:
    """Of a loss in which every output counts, without parameters that it does not depend on."""
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(6))
    loss = (outputs.sin() * weights).sum()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}


@each_source
def test_outputs_are_the_librarys(source: Source) -> None:
    module = randomised(source.build())
    model, x = loaded(module), pictures()
    assert model.card.checkpoint.layout == source.layout
    assert not model.training
    expected = source.run(module, x)
    assert float(expected.detach().std()) > 0.05
    assert_equal(model(x), expected)


@each_source
def test_gradients_are_the_librarys_under_own_names(source: Source) -> None:
    module = randomised(source.build())
    model, x = loaded(module), pictures()
    sent = gradients(dict(module.named_parameters()), source.run(module, x))
    own = recognised(dict(module.named_parameters())).to_own(sent)
    expected = gradients(dict(model.named_parameters()), model(x))
    assert own.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, grad in expected.items():
        # The gradient of a key's bias is zero: what is left there is rounding.
        if name.endswith("qkv.bias"):
            assert float((own[name] - grad).abs().max()) <= EXACT * float(grad.abs().max())
        else:
            assert_equal(own[name], grad, name)


@each_source
def test_gradients_with_a_step_axis_and_in_part(source: Source) -> None:
    module = randomised(source.build())
    names = dict(module.named_parameters())
    sent, layout = gradients(names, source.run(module, pictures())), recognised(names)
    steps = {name: torch.stack((grad, 2 * grad, 3 * grad)) for name, grad in sent.items()}
    one, three = layout.to_own(sent), layout.to_own(steps, axes=1)
    assert one.keys() == three.keys()
    assert all(torch.equal(three[name][1], 2 * one[name]) for name in one)
    first = dict(list(sent.items())[::2])
    in_part = recognised(first).to_own(first)
    assert in_part
    if recognised(first).name == layout.name:  # the names of a part may fit a simpler layout
        assert all(torch.equal(in_part[name], one[name]) for name in in_part)


@pytest.mark.nightly
def test_the_real_size_of_torchvision() -> None:
    vision = library("torchvision.models")
    module = randomised(vision.vit_b_32())
    model, x = loaded(module), pictures(224, 1)
    assert model.card.architecture == "vit d768 l12 h12 p32@224"
    assert_equal(model(x), module(x))


def test_a_fresh_head_of_zeros_hides_no_difference() -> None:
    """torchvision's head starts at zero, so the outputs of any network agree; what enters it does
    not."""
    module = torchvision_vit().eval()
    assert not bool(module(pictures()).any())
    assert_equal(loaded(module).forward_features(pictures())[:, 0], _before_head(module))
    module.encoder.layers[1].mlp[1] = nn.SiLU()  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match="the blocks compute something else"):
        loaded(module, num_heads=12)
    assert isinstance(loaded(module), TimmNetwork)  # with its own forward


def _before_head(module: Any) -> Tensor:
    module.heads, heads = nn.Identity(), module.heads
    features = module(pictures())
    module.heads = heads
    return features


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
def test_wrappers_are_taken_off(wrap: Any) -> None:
    module = randomised(torchvision_vit())
    wrapped = wrap(module)
    assert all(name.startswith(("module.", "_orig_mod.")) for name, _ in wrapped.named_parameters())
    assert_equal(loaded(wrapped)(pictures()), module(pictures()))
    names = [name for name, _ in wrapped.named_parameters()]
    assert recognised(names).to_own(dict(wrapped.named_parameters())).keys() == {
        name for name, _ in loaded(module).named_parameters()
    }


def test_the_module_keeps_its_modes_and_its_weights() -> None:
    module = randomised(timm_vit()).train()
    module.get_submodule("blocks.0").eval()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    modes = [part.training for part in module.modules()]
    model = loaded(module)
    assert [part.training for part in module.modules()] == modes
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in module.named_parameters())
    with torch.no_grad():
        model.cls_token.add_(1)
    assert torch.equal(module.get_parameter("cls_token"), before["cls_token"])


def test_own_models_are_returned_and_precision_is_kept() -> None:
    model = loaded(randomised(timm_vit()))
    assert load_module(model) is model
    assert load_module(nn.DataParallel(model)) is model
    double = loaded(randomised(timm_vit()).double())
    assert double.cls_token.dtype == torch.float64
    half = loaded(randomised(timm_vit()).bfloat16())
    assert half.cls_token.dtype == torch.float32
    plain = loaded(randomised(timm_vit(pos_embed="none")))
    assert (plain.position_embedding, plain.card.img_size) == ("strict", SIDE)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_hide_another_network(dtype: torch.dtype) -> None:
    """bfloat16 rounds by more than this scale changes the outputs."""
    module: Any = randomised(timm_vit()).to(dtype)
    module.blocks[0].ls1 = Scaled()
    assert isinstance(loaded(module), TimmNetwork)  # it keeps timm's own forward
    with pytest.raises(UserError, match="the blocks compute something else"):
        loaded(module, num_heads=4)
    assert next(module.parameters()).dtype == dtype


# refusals -----------------------------------------------------------------------------------------


def test_mean_and_std_are_never_guessed() -> None:
    with pytest.raises(UserError, match="mean=… and std=…"):
        load_module(torchvision_vit())
    module: Any = timm_vit()
    module.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    with pytest.raises(UserError, match=r"mean: .*127\.5"):
        load_module(module, mean=127.5, std=127.5)
    with pytest.raises(UserError, match=r"declares std=\(0.5, 0.5, 0.5\)"):
        load_module(module, mean=0.5)
    tower: Any = open_clip_tower()
    tower.image_mean = (0.48, 0.46, 0.41)
    with pytest.raises(UserError, match=r"declares mean=\(0.48, 0.46, 0.41\)"):
        load_module(tower)
    with pytest.raises(UserError, match="mean: "):
        load_module(timm_vit(), mean=(0.5, 0.5), std=0.5)


def test_heads_that_no_part_states_must_be_given() -> None:
    module: Any = randomised(timm_vit())
    for block in module.blocks:
        heads = block.attn.num_heads
        block.attn.heads = heads
        del block.attn.num_heads
        block.attn.forward = _attention_of(block.attn)
    assert isinstance(loaded(module), TimmNetwork)
    assert_equal(loaded(module, num_heads=4)(pictures()), module(pictures()))
    with pytest.raises(UserError, match="the blocks compute something else"):
        loaded(module, num_heads=2)


def _attention_of(attention: Any) -> Any:
    def forward(x: Tensor, **_: Any) -> Tensor:
        q, k, v = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return attention.proj(mixed.transpose(1, 2).flatten(2))

    return forward


def test_a_network_that_computes_something_else_keeps_its_forward() -> None:
    module: Any = randomised(timm_vit())
    module.blocks[1].mlp.act = nn.SiLU()
    pooled = randomised(timm_vit(global_pool="avg", fc_norm=False))
    scaled = randomised(open_clip_tower(ls_init_value=0.1))
    for other in (module, pooled, randomised(timm_vit(init_values=0.1)), scaled):
        copy = loaded(other)
        assert isinstance(copy, TimmNetwork)
        assert_equal(copy(pictures()), other(pictures()))


def test_parameters_that_a_plain_vit_has_not_are_named() -> None:
    with pytest.raises(UserError, match=r"blocks.0.ls1.gamma"):
        loaded(timm_vit(init_values=0.1), num_heads=4)
    with pytest.raises(UserError, match=r"blocks.0.attn.k_norm"):
        loaded(timm_vit(qk_norm=True), num_heads=4)
    teacher = hugging_face("DeiTForImageClassificationWithTeacher", "DeiTConfig")
    with pytest.raises(UserError, match="cls_classifier, distillation_classifier"):
        loaded(teacher, num_heads=4)
    grey = timm_vit(in_chans=1)
    with pytest.raises(UserError, match="3 channels, got 1"):
        loaded(grey)


def test_a_module_that_does_not_take_a_picture_or_returns_something_else() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = randomised(timm_vit())

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).softmax(-1)[:, :3]

    with pytest.raises(UserError, match=r"\(1, 10\).*\(1, 3\)"):
        loaded(Renamed(), num_heads=4)

    class Failing(Renamed):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("two pictures are needed")

    with pytest.raises(UserError, match="RuntimeError: two pictures"):
        loaded(Failing())


def test_the_text_tower_is_left_alone() -> None:
    whole = randomised(open_clip_model())
    grads = {name: torch.ones_like(p) for name, p in whole.named_parameters()}
    own = recognised(grads).to_own(grads)
    assert own["pos_embed"].shape == (1, 65, 96)
    assert own["positional_embedding"].shape == (8, 32)  # the text's, under its own name
    assert recognised(grads).unknown(grads) == []


def test_a_model_of_this_package_keeps_its_own_normalisation() -> None:
    model = tiny(torch.float32)
    assert load_module(model) is model
    assert load_module(nn.DataParallel(model), mean=model.card.mean) is model
    with pytest.raises(UserError, match=r"mean: .*0\.485"):
        load_module(model, mean=0.5)
