"""timm's own networks: their parts, their gradients as timm's class makes them, MJP on them."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor

from mjp_privacy import attack_gradients, save_upload
from mjp_privacy.cli import main
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.models import load_model, timm_networks
from mjp_privacy.models.checkpoint_files import download_timm, from_hub
from mjp_privacy.models.jigsaw import to_patches
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.tensor_files import save_tensors
from mjp_privacy.models.timm_networks import TimmNetwork, check_equation
from tests.helpers.planted import planted_images

TABLE, PATCH, BIAS = "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"
DINOV2, DEIT3 = "vit_small_patch14_dinov2", "deit3_small_patch16_224"
NETWORKS: dict[str, tuple[int, int | None]] = {
    DINOV2: (56, 1),  # layer scale
    "vit_base_patch16_siglip_224": (64, 0),  # no class token, attention pooling
    "vit_wee_patch16_reg1_gap_256": (64, 0),  # registers, mean pooling
    "deit_tiny_distilled_patch16_224": (64, 2),
    "eva02_tiny_patch14_224": (56, 1),  # SwiGLU, RoPE beside the table
    "cait_xxs24_224": (64, 0),
    "vit_small_patch16_rope_224": (64, None),
}
"""Side of the pictures, and rows of the table that are not the patches'; None: no table."""
CLASSES = 7
HALF: dict[str, Any] = {"mean": 0.5, "std": 0.5}


def network(name: str, side: int, **more: Any) -> TimmNetwork:
    """The network with random weights, in float64."""
    given = {"mean": 0.5, "std": 0.25, "num_classes": CLASSES, "img_size": side, **more}
    model = load_model(name, checkpoint="random", **given).double()
    assert isinstance(model, TimmNetwork)
    return model


def pictures(model: TimmNetwork, count: int = 2) -> Tensor:
    return torch.rand(count, 3, model.card.img_size, model.card.img_size, dtype=torch.float64)


def own_gradients(model: TimmNetwork, x: Tensor, label: int, names: list[str]) -> list[Tensor]:
    """Gradients of one picture as a loop of timm's user makes them."""
    net: Any = model.net
    parameters = dict(net.named_parameters())
    loss = torch.nn.functional.cross_entropy(net(x), torch.tensor([label]))
    return list(torch.autograd.grad(loss, [parameters[name] for name in names]))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_client_sends_timms_own_gradients_and_they_hold_every_patch(name: str) -> None:
    side, before = NETWORKS[name]
    model = network(name, side)
    names = [TABLE, PATCH] if before is not None else [PATCH, BIAS]
    images, patch = pictures(model), model.patch_size
    inputs = ClientInput(images, torch.tensor([3, 5]), ["a", "b"])
    update = make_upload(model, [inputs], ClientConfig(), names=names)
    for place, label in enumerate((3, 5)):
        x = model.normalize(images[place : place + 1])
        expected = own_gradients(model, x, label, names)
        sent = [update.grads[name][place] for name in names]
        for ours, theirs in zip(sent, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
        if before is not None:
            assert (model.before, model.grid) == (before, (4, 4))
            rows = sent[0].flatten(0, -2)[before:]
            solved = torch.linalg.lstsq(rows.mT, sent[1].flatten(1)).solution
            torch.testing.assert_close(solved, to_patches(x[0], patch), rtol=0, atol=1e-6)
            continue
        assert (model.pos_embed, model.position_embedding) == (None, "strict")
        # G = sum_i g_i x_i^T and b = sum_i g_i: adding a constant to all patches adds it times b.
        wide = torch.cat((to_patches(x[0], patch), torch.ones(16, 1).double()), 1)
        both = torch.cat((sent[0].flatten(1), sent[1].unsqueeze(1)), 1)
        g = torch.linalg.lstsq(wide.mT, both.mT).solution
        torch.testing.assert_close(wide.mT @ g, both.mT, rtol=1e-7, atol=1e-15)


def test_masked_patches_have_e_unk_in_place_of_their_row() -> None:
    model = network("vit_wee_patch16_reg1_gap_256", 64, unknown_embedding=True)
    mask, before = torch.zeros(2, 16, dtype=torch.bool), model.before
    mask[0, [1, 7]] = mask[1, 3] = True
    x, replaced = model.normalize(pictures(model)), copy.deepcopy(model)
    for place in range(2):
        with torch.no_grad():
            rows = model.pos_embed.clone()  # type: ignore[union-attr]
            rows[0, before:][mask[place]] = model.unk_embed[0]  # type: ignore[index]
            replaced.pos_embed.copy_(rows)  # type: ignore[union-attr]
        expected = replaced(x[place : place + 1])
        torch.testing.assert_close(model(x, mask)[place : place + 1], expected)
    inputs = ClientInput(pictures(model), torch.tensor([3, 5]), ["a", "b"], mask=mask)
    update = make_upload(model, [inputs], ClientConfig(), names=[TABLE, "unk_embed"])
    rows = update.grads[TABLE].flatten(1, -2)[:, before:]
    assert rows[mask].abs().max() == 0
    assert rows[~mask].abs().amax(-1).min() > 0
    assert update.grads["unk_embed"].abs().amax((1, 2, 3)).min() > 0


# from a name or a file ----------------------------------------------------------------------------


def test_a_file_gives_the_network_back_and_a_seed_its_weights(tmp_path: Path) -> None:
    model = network(DINOV2, 56, unknown_embedding=True).float()
    path, x = tmp_path / "dinov2.safetensors", pictures(model).float()
    save_tensors(path, {key: t.contiguous() for key, t in model.state_dict().items()}, {})
    loaded = load_model(DINOV2, checkpoint=path, img_size=56, **HALF)
    assert torch.equal(loaded(x), model(x))
    assert loaded.unk_embed is not None
    outline = outline_model(DINOV2, checkpoint=path, img_size=56)
    assert {p.device.type for p in outline.parameters()} == {"meta"}
    for given, said in (({"img_size": 70, **HALF}, "pos_embed"), ({"img_size": 56}, "mean=…")):
        with pytest.raises(UserError, match=said):
            load_model(DINOV2, checkpoint=path, **given)
    small: dict[str, Any] = {"img_size": 32, "checkpoint": "random", **HALF}
    one, same, other = (load_model(DEIT3, seed=seed, **small) for seed in (0, 0, 1))
    assert torch.equal(one.pos_embed, same.pos_embed)
    assert not torch.equal(one.pos_embed, other.pos_embed)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("xcit_nano_12_p16_224", {}, "patch_embed.proj"),  # a stem of several convolutions
        ("vit_small_r26_s32_224", {}, "2048"),  # patches of a CNN's features
        ("vit_small_patch14_dinov5", {}, "vit_small_patch14_dinov5"),
        (DINOV2, {"depth": 3}, "depth"),  # timm's own
        (DINOV2, {"img_size": 8, "num_classes": 2}, "img_size"),
        (DINOV2, {"checkpoint": None}, DINOV2),
        ("vit_small_patch16_rope_224", {"unknown_embedding": True}, "unknown_embedding"),
    ],
)
def test_what_is_no_vit_of_pixels_or_not_timms_is_refused(
    name: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        load_model(name, **{"checkpoint": "random", **given, **HALF})


def test_networks_that_memory_or_size_do_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_networks, "free_bytes", lambda device: 10**8)
    with pytest.raises(UserError, match=r"deit3_base_patch16_224.*0\.3 GB"):
        load_model("deit3_base_patch16_224", checkpoint="random", **HALF)
    create = timm.create_model

    def of_one_size(name: str, **options: Any) -> torch.nn.Module:
        if "img_size" in options:
            raise TypeError("unexpected keyword argument 'img_size'")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", of_one_size)
    with pytest.raises(UserError, match=r"256.* 64"):
        outline_model("vit_wee_patch16_reg1_gap_256", checkpoint="random", img_size=64)


def test_an_outline_of_a_download_is_made_of_what_timm_declares() -> None:
    name = f"{DINOV2}.lvd142m"
    for given in ({"checkpoint": f"timm:{name}"}, {"name": name}):
        outline = outline_model(num_classes=CLASSES, **given)
        assert isinstance(outline, TimmNetwork)
        assert (outline.card.img_size, outline.card.mean[0]) == (518, 0.485)
        assert outline.card.interpolation == "bicubic"
        assert (outline.other_tokens, outline.token_width) == ("", 384)  # no number tells another


@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_folder_or_repository_with_timms_config_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A backbone without a classifier, saved with its config as timm puts it on a hub."""

    def download(repository: str, name: str) -> str:
        if repository != "someone/dinov2":
            raise OSError("no network")
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source: Any = tmp_path if place == "folder" else "hf-hub:someone/dinov2"
    net, x = timm.create_model(DINOV2, img_size=28, num_classes=0).eval(), torch.randn(2, 3, 28, 28)
    timm.models.save_for_hf(net, str(tmp_path), safe_serialization=True)
    model = load_model(checkpoint=source, num_classes=CLASSES)
    assert isinstance(model, TimmNetwork)
    assert (model.card.img_size, model.card.mean) == (28, (0.485, 0.456, 0.406))
    torch.testing.assert_close(model.forward_features(x), net.forward_features(x))
    assert len(model.card.checkpoint.notes) == 1  # a fresh classifier, seeded
    again = load_model(checkpoint=source, num_classes=CLASSES)
    assert torch.equal(model.head.weight, again.head.weight)
    assert outline_model(checkpoint=source, num_classes=CLASSES).grid == (2, 2)
    with pytest.raises(UserError, match="num_classes"):
        load_model(checkpoint=source)
    if place == "hub":
        (tmp_path / "model.safetensors").unlink()
        from_hub.cache_clear()
        for gone, said in ((source, "model.safetensors"), ("hf-hub:x/y", "hf-hub:x/y")):
            with pytest.raises(UserError, match=said):
                load_model(checkpoint=gone, num_classes=CLASSES)
        return
    net = timm.create_model(DINOV2, img_size=28, num_classes=0, global_pool="avg")
    timm.models.save_for_hf(net, str(tmp_path), safe_serialization=True)
    with pytest.raises(UserError, match="global_pool"):
        load_model(checkpoint=source, num_classes=CLASSES)


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its client looks in its cache alone, which the next call may ask again; also where two
    threads ask."""
    asked, offline = [], huggingface_hub.constants.HF_HUB_OFFLINE

    class Session:
        def head(self, url: str, **_: Any) -> None:
            asked.append(url)
            raise OSError("no network")

    def created(name: str, **_: Any) -> None:
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        time.sleep(0.05)
        raise OSError("not in the cache")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    monkeypatch.setattr(timm, "create_model", created)
    name = "vit_tiny_patch16_224"
    with ThreadPoolExecutor() as threads:
        for call in [threads.submit(download_timm, name) for _ in range(2)]:
            with pytest.raises(UserError, match=name):
                call.result()
    assert len(asked) == 2
    assert huggingface_hub.constants.HF_HUB_OFFLINE is offline


# live ones ----------------------------------------------------------------------------------------


def test_live_networks_that_are_frozen_or_use_their_table_otherwise() -> None:
    net = timm.create_model(DEIT3, img_size=32, num_classes=CLASSES)
    copied = load_module(net.requires_grad_(False), **HALF)
    assert copied.position_embedding == "learned"
    assert not any(parameter.requires_grad for parameter in net.parameters())
    net = timm.create_model("vit_wee_patch16_reg1_gap_256", img_size=64, num_classes=CLASSES)
    plain = net._pos_embed
    net._pos_embed = lambda x: plain(x * 2)
    with pytest.raises(UserError, match="patch embedding"):
        check_equation(TimmNetwork(net))
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3}
    norm = torch.nn.LayerNorm  # of the embedded patches, before the table, as AIMv2 has it
    net = timm.models.VisionTransformer(**sizes, num_classes=CLASSES, embed_norm_layer=norm)
    model = load_module(net, **HALF)
    assert (model.pos_embed, model.position_embedding) == (None, "strict")
    assert "behind a norm" in model.card.architecture
    assert "pos_embed" in dict(model.named_parameters())


def test_a_live_module_is_attacked_and_its_upload_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = timm.create_model("vit_small_patch16_dinov3", img_size=64, num_classes=CLASSES).eval()
    image = planted_images(1, size=64).float().mul(255).round() / 255
    torch.nn.functional.cross_entropy(net((image - 0.5) / 0.5), torch.tensor([3])).backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    leak = attack_gradients(net, gradients, attacks=["patch_lattice"], **HALF)
    found = to_patches(leak.best.image.float(), 16)
    for patch in to_patches(image[0], 16):  # to the bit, whatever place the jigsaw gave it
        assert (found - patch).abs().amax(1).min() < 1e-6
    save_upload(tmp_path / "ups", net, gradients, images=image, **HALF)
    assert main(["check", str(tmp_path / "ups")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("applies" in line and "patch_lattice" in line for line in lines)
    assert any("april" in line and "not" in line for line in lines)
