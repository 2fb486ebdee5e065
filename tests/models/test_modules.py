"""Live networks of other libraries: the same outputs and gradients here, or a refusal; those that
are no plain ViT with their own forward, and tables that are stretched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mjp_privacy import save_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.layouts import recognised
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.timm_networks import TimmNetwork
from tests.helpers.libraries import (
    DIM,
    SIDE,
    SOURCES,
    Source,
    library,
    open_clip_tower,
    randomised,
    timm_vit,
    torchvision_vit,
)
from tests.helpers.models import tiny
from tests.uploads.networks import Convolved, Flattened, leak_of, outputs, photographs

EXACT = 1e-5
PATCH = 8  # of networks of one's own


def loaded(module: nn.Module, **facts: Any) -> LoadedModel:
    return load_module(module, **{"mean": 0.5, "std": 0.5, **facts})


def pictures(side: int = SIDE) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(5))


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


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_outputs_and_gradients_are_the_librarys_under_own_names(source: Source) -> None:
    module = randomised(source.build())
    model, x = loaded(module), pictures()
    assert (model.card.checkpoint.layout, model.training) == (source.layout, False)
    outputs = source.run(module, x)
    assert float(outputs.detach().std()) > 0.05
    assert_equal(model(x), outputs)
    names = dict(module.named_parameters())
    sent, layout = gradients(names, outputs), recognised(names)
    own, expected = layout.to_own(sent), gradients(dict(model.named_parameters()), model(x))
    assert own.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, grad in expected.items():
        if name.endswith("qkv.bias"):  # that of a key's bias is zero: what is left is rounding
            assert float((own[name] - grad).abs().max()) <= EXACT * float(grad.abs().max())
        else:
            assert_equal(own[name], grad, name)
    steps = {name: torch.stack((grad, 2 * grad, 3 * grad)) for name, grad in sent.items()}
    three = layout.to_own(steps, axes=1)
    assert own.keys() == three.keys()
    assert all(torch.equal(three[name][1], 2 * own[name]) for name in own)


def test_a_fresh_head_of_zeros_hides_no_difference() -> None:
    """torchvision's head starts at zero, so the outputs of any network agree; what enters it does
    not."""
    module: Any = torchvision_vit().eval()
    assert not bool(module(pictures()).any())
    features = loaded(module).forward_features(pictures())[:, 0]
    heads, module.heads = module.heads, nn.Identity()
    assert_equal(features, module(pictures()))
    module.heads = heads
    module.encoder.layers[1].mlp[1] = nn.SiLU()
    assert isinstance(loaded(module), TimmNetwork)  # with its own forward


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["parallel", "compiled"])
def test_wrappers_are_taken_off_and_the_module_is_left_as_it_was(wrap: Any) -> None:
    module = randomised(torchvision_vit())
    parameters = dict(wrap(module).named_parameters())
    assert all(name.startswith(("module.", "_orig_mod.")) for name in parameters)
    expected = module(pictures())
    module.train().get_submodule("encoder.layers.encoder_layer_0").eval()
    modes = [part.training for part in module.modules()]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = loaded(wrap(module))
    assert_equal(model(pictures()), expected)
    assert recognised(parameters).to_own(parameters).keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        model.cls_token.add_(1)
    assert [part.training for part in module.modules()] == modes
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_own_models_are_returned_and_precision_is_kept() -> None:
    model = tiny(torch.float32)
    for same in (load_module(model), load_module(nn.DataParallel(model), mean=model.card.mean)):
        assert same is model
    for facts in ({"mean": 0.5}, {"img_size": 48}):
        with pytest.raises(UserError, match=next(iter(facts))):
            load_module(model, **facts)
    for change, dtype in (("double", torch.float64), ("bfloat16", torch.float32)):
        copy = loaded(getattr(randomised(timm_vit()), change)())
        assert copy.cls_token.dtype == dtype
    plain = loaded(randomised(timm_vit(pos_embed="none")))
    assert (plain.position_embedding, plain.card.img_size) == ("strict", SIDE)


def test_networks_that_compute_something_else_keep_their_forward() -> None:
    """Also in half precision, which rounds by more than a small scale changes the outputs."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1.01 * x

    silu: Any = randomised(timm_vit())
    silu.blocks[1].mlp.act = nn.SiLU()
    pooled = randomised(timm_vit(global_pool="avg", fc_norm=False))
    scaled = randomised(timm_vit(init_values=0.1))
    cut = Wrapped(lambda x: x[:, :3]).eval()
    for other in (silu, pooled, scaled, cut):
        copy = loaded(other)
        assert isinstance(copy, TimmNetwork)
        assert_equal(copy(pictures()), other(pictures()))
    half: Any = randomised(timm_vit()).bfloat16()
    half.blocks[0].ls1 = Scaled()
    assert isinstance(loaded(half), TimmNetwork)
    assert next(half.parameters()).dtype == torch.bfloat16


# refusals -----------------------------------------------------------------------------------------


def test_mean_and_std_are_never_guessed() -> None:
    module: Any = randomised(timm_vit())
    module.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}
    tower: Any = open_clip_tower()
    tower.image_mean = (0.48, 0.46, 0.41)
    for network, given, said in (
        (torchvision_vit(), {}, "mean=… and std=…"),
        (module, {"mean": 127.5, "std": 127.5}, r"mean: .*127\.5"),
        (module, {"mean": 0.5}, r"std=\(0.5, 0.5, 0.5\)"),
        (tower, {}, r"mean=\(0.48, 0.46, 0.41\)"),
    ):
        with pytest.raises(UserError, match=said):
            load_module(network, **given)

    def attention_of(attention: Any) -> Any:
        def forward(x: Tensor, **_: Any) -> Tensor:
            q, k, v = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return attention.proj(mixed.transpose(1, 2).flatten(2))

        return forward

    for block in module.blocks:
        del block.attn.num_heads
        block.attn.forward = attention_of(block.attn)
    assert isinstance(loaded(module), TimmNetwork)  # where nothing states the number of heads
    assert_equal(loaded(module)(pictures()), module(pictures()))


class Wrapped(nn.Module):
    """A network whose answer, or whose failure, is another's than its weights'."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.answer = randomised(timm_vit()), answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.model(x))


def fails(x: Tensor) -> Tensor:
    raise RuntimeError("two pictures are needed")


class Upended(Convolved):
    """One that reads the rows of its patches from below, with a fresh classifier of zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.to_classes.weight)

    def patches(self, x: Tensor) -> Tensor:
        return self.embed(x).flip(2).flatten(2).mT  # type: ignore[no-any-return]


class Uncalled(Convolved):
    """One that reads its patch embedding's weights and never calls it."""

    def patches(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.embed.weight, stride=PATCH).flatten(2).mT


class Detached(Convolved):
    """One that does not learn its patch embedding."""

    def patches(self, x: Tensor) -> Tensor:
        return super().patches(x).detach()


class TwoTables(Upended):
    """One with a second table of positions, of which none is of the patches in order."""

    def __init__(self) -> None:
        super().__init__()
        self.more_pos = nn.Parameter(torch.zeros(1, 16, DIM))


def embedded_by(convolution: nn.Module) -> nn.Module:
    """A network without a table of positions."""
    width = len(next(convolution.parameters()))
    return nn.Sequential(
        nn.Sequential(convolution, nn.Flatten(2)),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {  # and what is named
    "normalises": (lambda: nn.Sequential(nn.InstanceNorm2d(3), timm_vit()), {}, "Sequential"),
    "normalises as it is trained": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), Convolved()),
        {},
        "Sequential",
    ),
    "bent patches": (lambda: Flattened(nn.Tanh()), {}, "embed.1"),
    "four channels": (lambda: timm_vit(in_chans=4), {}, "VisionTransformer"),
    "failure": (lambda: Wrapped(fails), {}, "RuntimeError"),
    "linear": (lambda: nn.Linear(3, 3), {}, "Linear"),
    "two tables": (TwoTables, {}, "more_pos"),
    "rows from below, a head of zeros": (Upended, {}, "Upended"),
    "an embedding that is not learned": (Detached, {}, "Detached"),
    "an embedding that is not called": (Uncalled, {}, "Conv2d(3"),
    "overlapping patches": (lambda: timm.create_model("pit_ti_224"), {}, "patch_embed.conv"),
    "films": (lambda: embedded_by(nn.Conv3d(3, DIM, (1, 8, 8), (1, 8, 8))), {}, "0.0"),
    "six channels": (lambda: embedded_by(nn.Conv2d(6, DIM, 8, 8)), {}, "0.0"),
    "gaps": (lambda: embedded_by(nn.Conv2d(3, DIM, 2, PATCH)), {}, "0.0"),
    "groups": (lambda: embedded_by(nn.Conv2d(3, 3 * DIM, PATCH, PATCH, groups=3)), {}, "groups=3"),
    "traced": (lambda: torch.jit.trace(Flattened(), pictures()), {}, "TopLevelTracedModule"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_network_that_is_refused_is_named_or_what_it_lacks(kind: str) -> None:
    build, given, named = REFUSED[kind]
    with pytest.raises(UserError) as caught:
        loaded(build(), **given)
    assert named in str(caught.value)
    assert "load_module" not in str(caught.value)  # which was called


class Drawing(timm.models.VisionTransformer):  # type: ignore[misc]
    """A plain ViT that turns pictures around now and then, or draws for it and does not."""

    turns = True

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(()) < 0.5
        return super().forward(x.flip(3) if self.turns and drawn else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential])
def test_random_layers_are_refused_however_torch_is_seeded(wrap: Callable[..., nn.Module]) -> None:
    """A network that draws and computes the same is none of them."""
    net = Drawing(img_size=SIDE, patch_size=PATCH, embed_dim=DIM, depth=1, num_heads=4)
    for seed in range(3):
        torch.manual_seed(seed)
        with pytest.raises(UserError, match="random"):
            loaded(wrap(net))
        assert torch.initial_seed() == seed
    net.turns = False
    assert loaded(wrap(net)).grid == (SIDE // PATCH, SIDE // PATCH)


# networks with their own forward ------------------------------------------------------------------

WIDE = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3}


def dinov2(kind: str, **more: Any) -> nn.Module:
    """transformers' Dinov2 with random weights, whose table is for pictures of 56 px."""
    transformers = library("transformers")
    config = "Dinov2WithRegistersConfig" if "Registers" in kind else "Dinov2Config"
    settings = getattr(transformers, config)(image_size=56, patch_size=14, **WIDE, **more)
    return getattr(transformers, kind)(settings).eval()  # type: ignore[no-any-return]


def siglip() -> nn.Module:
    transformers = library("transformers")
    vision = {"image_size": 64, "patch_size": 16, "intermediate_size": 384, **WIDE}
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision)).eval()  # type: ignore[no-any-return]


CLASSIFIER, TOKENS = "Dinov2ForImageClassification", "token_peeling"


def vit_of_64_pixels() -> nn.Module:
    """transformers' ViT, which takes other pictures than its own when it is told to."""
    transformers = library("transformers")
    settings = transformers.ViTConfig(image_size=64, patch_size=8, intermediate_size=384, **WIDE)
    return transformers.ViTModel(settings).eval()  # type: ignore[no-any-return]


def clip_of_64_pixels() -> nn.Module:
    """The same of CLIP, which hands on what it is told, with weights that pass gradients on."""
    transformers = library("transformers")
    vision = {"image_size": 64, "patch_size": 8, "intermediate_size": 384, **WIDE}
    settings = transformers.CLIPConfig(vision_config=vision, num_labels=5)
    return randomised(transformers.CLIPForImageClassification(settings))


OWN_FORWARD: dict[str, tuple[Callable[[], nn.Module], int, int | None]] = {
    CLASSIFIER: (lambda: dinov2(CLASSIFIER, num_labels=5), 56, None),
    "Dinov2WithRegistersModel": (lambda: dinov2("Dinov2WithRegistersModel"), 56, None),
    "SiglipVisionModel": (siglip, 64, None),
    "stretched when told to": (vit_of_64_pixels, 32, 32),
    "stretched, looked up": (siglip, 32, 32),
    "stretched, looked up, before a norm": (clip_of_64_pixels, 32, 32),
}


@pytest.mark.parametrize("name", OWN_FORWARD)
def test_networks_with_their_own_forward_leak_their_picture(name: str) -> None:
    """Also where a table is stretched: it still tells the rows of the patches."""
    build, side, img_size = OWN_FORWARD[name]
    module = build()
    if img_size is None:
        copy, x = loaded(module), torch.randn(2, 3, side, side)
        assert isinstance(copy, TimmNetwork)
        torch.testing.assert_close(copy(x), outputs(module, x))
        count = sum(parameter.numel() for parameter in module.parameters())
        assert sum(parameter.numel() for parameter in copy.parameters()) == count
    before = {key: parameter.double() for key, parameter in module.named_parameters()}
    picture = photographs(1, side)
    leak = leak_of(module, picture, img_size=img_size, attacks=["patch_gradient"])
    assert leak["patch_gradient"].psnr > 60
    assert all(torch.equal(before[key], p) for key, p in module.named_parameters())


def test_a_table_stretched_to_more_patches_than_it_has_is_withheld() -> None:
    """What needs no gradient of it applies."""
    network = dinov2(CLASSIFIER, num_labels=5)
    asked = ["patch_gradient", TOKENS]
    leak = leak_of(network, photographs(1, 98), img_size=98, attacks=asked)
    assert "pos_embed" in leak.refused["patch_gradient"]
    assert any("pos_embed" in note for note in leak.notes)
    assert leak[TOKENS].exact == 1


class Checkpointed(Convolved):
    """One that computes its blocks again in the backward pass, where hooks are gone."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        run = super().forward
        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_what_a_network_raises_where_its_residual_is_computed_is_a_note() -> None:
    leak = leak_of(Checkpointed(), photographs(1), attacks=["patch_gradient"], labels=[0])
    assert leak.best.exact == 1
    assert leak.best.residuals is None
    assert any("CheckpointError" in note for note in leak.notes)


class Pooled(nn.Module):
    """A backbone of transformers with a classifier of its tokens' mean."""

    def __init__(self, kind: str, config: str, **more: Any) -> None:
        super().__init__()
        transformers = library("transformers")
        sizes = {"image_size": 64, "patch_size": 16, "intermediate_size": 768, **WIDE}
        settings = getattr(transformers, config)(**sizes, initializer_range=0.05, **more)
        self.backbone = getattr(transformers, kind)(settings)
        self.classify = nn.Linear(WIDE["hidden_size"], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.backbone(x).last_hidden_state.mean(1))  # type: ignore[no-any-return]


BIAS = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
WITHOUT_A_TABLE: dict[str, Callable[[], nn.Module]] = {
    "rotary": lambda: Pooled("DINOv3ViTModel", "DINOv3ViTConfig", layerscale_value=0.1),
    "relative bias": lambda: Pooled("BeitModel", "BeitConfig", **BIAS),
}


@pytest.mark.parametrize("name", WITHOUT_A_TABLE)
def test_transformers_networks_leak_without_the_gradient_of_a_table(name: str) -> None:
    """Block 0's layers are found by the order in which they run."""
    torch.manual_seed(0)
    leak = leak_of(WITHOUT_A_TABLE[name](), photographs(1, 64), without="position_emb")
    found = leak["token_peeling"]
    assert found.exact == 1
    assert found.is_certain == (name != "relative bias")  # untrained ones see no order


class Attention(nn.Module):
    """Attention with its norm inside, and its last layer in a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False)
        self.to_out = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Paired(Flattened):
    """One whose blocks are pairs in a list, as vit-pytorch's are, with its norms around the patch
    embedding or without."""

    def __init__(self, *, before: bool = False, after: bool = False) -> None:
        super().__init__(*([nn.LayerNorm(3 * PATCH**2)] if before else []))
        made_anew = nn.Hardtanh(-1e9, 1e9)  # the same numbers in another tensor
        self.embed.extend([made_anew, nn.LayerNorm(DIM)] if after else [])
        for norm in self.embed:
            if isinstance(norm, nn.LayerNorm):
                nn.init.uniform_(norm.weight, 0.5, 2)
                nn.init.uniform_(norm.bias)
        wide = [nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)]
        pairs = [[Attention(), nn.Sequential(*wide)], [Attention(), nn.Identity()]]
        self.encoder, self.layers = nn.Identity(), nn.ModuleList(map(nn.ModuleList, pairs))
        self.registers = nn.Parameter(torch.randn(1, 2, DIM))  # behind the patches

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat((self.placed(self.embedded(x)), self.registers), 1)
        for attention, wide in self.layers:  # type: ignore[attr-defined]
            tokens = tokens + attention(tokens)
            tokens = tokens + wide(tokens)
        return self.head(tokens.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_norms_around_the_patch_embedding_hide_brightness_at_most(
    before: bool, after: bool
) -> None:
    """What a norm of each patch takes away is its mean, which is guessed by borders."""
    torch.manual_seed(0)
    picture = photographs(1)
    leak = leak_of(Paired(before=before, after=after), picture, without="pos")
    found = leak["token_peeling"]
    contrasts = [
        (patches := to_patches(x, PATCH)) - patches.mean(1, keepdim=True)
        for x in (found.images[0], picture[0])
    ]
    off = (contrasts[0] - contrasts[1]).abs()
    assert float(off.amax(1).median()) < 1e-4  # some are beyond black or white, and cut there
    assert found.psnr > 20
    assert (found.exact == 1, found.is_certain) == (not before, not before)
    assert leak.best.attack == "token_peeling"


def test_what_a_network_with_its_own_forward_cannot(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(8 * 64, 10))
    for module, img_size, named in (
        (plain, None, "img_size"),  # without a table nothing shows it
        (Convolved(), 48, "img_size"),  # its table is added as it is
    ):
        with pytest.raises(UserError, match=named):
            loaded(module, img_size=img_size)
    assert loaded(plain, img_size=32).grid == (8, 8)
    module = dinov2(CLASSIFIER, num_labels=5)
    outputs(module, pictures(56)).sum().backward()
    with pytest.raises(UserError, match=CLASSIFIER):  # no file says all that it takes
        save_upload(tmp_path, module, mean=0.5, std=0.5)
