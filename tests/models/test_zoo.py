"""Models by name, checkpoints of a command line, and what is known before weights are read."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import PACKAGED_FOLDER, read_metadata
from mjp_privacy.models.loading import check_names, outline_model, outline_spec
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.models.zoo import NamedCheckpoint, named_checkpoints, spec_by_name
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.config import load_training, recipe_in
from mjp_privacy.training.evaluation import load_checkpoint
from tests.helpers.models import KNOWN, MEAN, SMALL, STD, saved, state_of

ROWS = ("vit", "vit_no_pe", "vit_mjp", "vit_mjp_controlled", "vit_jp", "vit_closed_form")
MODELS = {f"cifar_{row}": ("zoo.yaml", row) for row in ROWS}
MODELS |= {f"patch14_{row}": ("patch14.yaml", row) for row in ("vit", "vit_mjp")}
CONFIGS = Path(__file__).parents[2] / "configs" / "training"
LEAST = {"cifar_vit": 60, "cifar_vit_closed_form": 45, "patch14_vit": 45, "patch14_vit_mjp": 50}
"""The accuracy in percent that a model reaches at least; all others 55."""


def facts(model: LoadedModel) -> dict[str, Any]:
    card = {name: v for name, v in vars(model.card).items() if name != "checkpoint"}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return card | {"dal": model.dal_kind, "positions": model.position_embedding} | shapes


def assert_outline(model: LoadedModel, **given: Any) -> None:
    """An outline has all but the weights of the model."""
    outline = outline_model(**given, whole=True)
    assert facts(outline) == facts(model)
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"}
    assert not outline.training


@pytest.mark.parametrize("name", MODELS)
def test_a_packaged_model_is_what_its_name_and_its_config_say(name: str) -> None:
    """A CIFAR model's embedding can be inverted, and its patches are fewer than the width; a step
    of ten pictures of a patch14 model is within reach of the closed forms for batches."""
    config, row = MODELS[name]
    metadata = read_metadata(f"packaged:{name}")
    stated = {key: json.loads(value) for key, value in metadata.items() if key != DIGEST_KEY}
    training = load_training(CONFIGS / config, row)
    assert recipe_in(metadata) == training
    assert stated["steps"] == training.recipe.epochs * (50_000 // training.recipe.batch)
    assert stated["val_top1"] >= LEAST.get(name, 55)
    assert stated["commit"]
    model = load_model(name)
    assert (model.unk_embed is not None) == ("mjp" in row)
    assert (model.position_embedding == "exposed") == (row == "vit_no_pe")
    assert (model.first_block == "closed_form") == (row == "vit_closed_form")
    assert model.card.trained_gamma == (0.27 if "jp" in row else 0)
    side = 7 if name.startswith("cifar") else 14
    assert (model.card.img_size, model.card.resize, model.patch_size) == (56, 56, side)
    embedding = model.patch_embed.proj.weight.detach().flatten(1)
    assert embedding.shape == (160, 3 * side**2)
    if side == 7:
        assert torch.linalg.matrix_rank(embedding.double()) == 147
        assert model.patch_embed.num_patches + 1 <= 160
    else:
        assert model.patch_embed.num_patches * 10 <= model.embed_dim
    assert_outline(model, name=name)
    files = {path.stem: path.stat().st_size for path in PACKAGED_FOLDER.glob("*.safetensors")}
    assert files.keys() == MODELS.keys()
    assert files[name] <= 2.8e6


def test_the_normalisation_of_named_models_is_known() -> None:
    half = (0.5, 0.5, 0.5)
    assert spec_by_name("vit_small").mean == half
    assert (spec_by_name("deit_small_mjp").mean, spec_by_name("deit_small_mjp").std) == (MEAN, STD)
    tagged = spec_by_name("vit_base_patch16_384.augreg_in21k_ft_in1k")
    assert (tagged.mean, tagged.std, tagged.img_size, tagged.resize) == (half, half, 384, 384)
    assert spec_by_name("vit_base_patch16_224").mean is None  # an architecture is no checkpoint
    check_names("vit_tiny_patch16_224", "nowhere.pth")


# checkpoints of a command line --------------------------------------------------------------------


def test_options_are_about_the_files_that_do_not_state_it(tmp_path: Path) -> None:
    silent = tmp_path / "silent.safetensors"  # states nothing of itself
    save_file({"x": torch.zeros(1)}, silent)
    mixed = named_checkpoints(["cifar_vit", "timm:resnet18", str(silent)], "--checkpoint")
    assert [item.described for item in mixed] == [False, False, True]
    assert mixed[2].label == "silent"
    stating = named_checkpoints(["cifar_vit", "cifar_vit_mjp"], "--checkpoint")
    assert [item.described for item in stating] == [True, True]
    own = mixed[0].source
    for described, given, mean in (
        (False, {"model": "vit_tiny_patch16_224"}, (0.4914, 0.4822, 0.4465)),
        (True, {}, (0.1, 0.1, 0.1)),
    ):
        arguments = EvaluationArguments(("cifar_vit",), mean=(0.1,), **given)
        loaded = load_checkpoint(NamedCheckpoint("cifar_vit", own, described), arguments)
        assert loaded.card.mean == pytest.approx(mean)
    assert named_checkpoints(["cifar_vit.pth"], "--checkpoint")[0].source == "cifar_vit.pth"
    for items, said in (
        (["cifar_vitt"], r"cifar_vit\?"),
        (["a=x.pth", "a=y.pth"], "'a'"),
        (["=x.pth"], "=x.pth"),
    ):
        with pytest.raises(UserError, match=said):
            named_checkpoints(items, "--checkpoint")


# outlines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mjp", "overridden", "random"])
def test_an_outline_of_a_file(tmp_path: Path, kind: str) -> None:
    path, state = tmp_path / "weights.pth", state_of(unknown_embedding=True, dal="linear")
    saved(tmp_path, {"model": state})
    given: dict[str, Any] = {**KNOWN, "checkpoint": path}
    if kind == "overridden":
        given |= {"img_size": 48}
    if kind == "random":
        given = {**SMALL, "checkpoint": "random", "unknown_embedding": True, "trained_gamma": 0.5}
    assert_outline(load_model(**given), **given)


def test_an_outline_needs_neither_values_nor_weights_nor_a_network(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(state_of(), path)
    assert outline_spec(checkpoint=path)[0].num_heads is None
    with pytest.raises(UserError, match=r"num_heads.*mean.*std.*--num-heads, --mean, --std"):
        outline_model(checkpoint=path, whole=True)
    started = time.process_time()
    large = outline_model("vit_large_patch16_224", checkpoint="random")
    assert (large.embed_dim, len(large.blocks)) == (1024, 24)
    assert outline_model("vit_base_patch32_224.augreg_in21k_ft_in1k", whole=True).patch_size == 32
    assert time.process_time() - started < 2
