"""The trained models inside the package: small, complete, and what their names say."""

import json
from pathlib import Path

import pytest
import torch

from mjp_privacy.data import open_images
from mjp_privacy.models import load_model
from mjp_privacy.models.checkpoint_files import PACKAGED_FOLDER, read_metadata
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.training.config import plain
from mjp_privacy.training.config_files import load_training
from mjp_privacy.training.evaluation import Protocol, measure

ROWS = ("vit", "vit_no_pe", "vit_mjp", "vit_mjp_controlled", "vit_jp", "vit_closed_form")
PATCH14_ROWS = ("vit", "vit_mjp")
CONFIGS = Path(__file__).parents[2] / "configs" / "training"
LEAST = {"cifar_vit": 60, "cifar_vit_closed_form": 45, "patch14_vit": 45, "patch14_vit_mjp": 50}
"""The accuracy in percent that a model reaches at least; all others 55."""


def test_the_files_are_small_and_no_other_lies_there() -> None:
    files = {path.stem: path.stat().st_size for path in PACKAGED_FOLDER.glob("*.safetensors")}
    of_batches = {f"patch14_{row}" for row in PATCH14_ROWS}
    assert set(files) == {f"cifar_{row}" for row in ROWS} | of_batches
    assert max(files.values()) <= 2.8e6
    assert sum(size for name, size in files.items() if name not in of_batches) <= 16e6


@pytest.mark.parametrize(
    ("config", "name", "row"),
    [
        *(("zoo.yaml", f"cifar_{row}", row) for row in ROWS),
        *(("patch14.yaml", f"patch14_{row}", row) for row in PATCH14_ROWS),
    ],
)
def test_a_model_was_trained_as_its_config_says(config: str, name: str, row: str) -> None:
    metadata = read_metadata(f"packaged:{name}")
    facts = {key: json.loads(value) for key, value in metadata.items() if key != DIGEST_KEY}
    training = load_training(CONFIGS / config, row)
    assert facts["recipe"] == json.loads(json.dumps(plain(training)))
    assert facts["steps"] == training.recipe.epochs * (50_000 // training.recipe.batch)
    assert facts["val_top1"] >= LEAST.get(name, 55)
    assert facts["commit"]


@pytest.mark.parametrize("row", ROWS)
def test_a_model_is_what_its_name_says(row: str) -> None:
    model = load_model(f"cifar_{row}")
    assert (model.unk_embed is not None) == ("mjp" in row)
    assert (model.position_embedding == "exposed") == (row == "vit_no_pe")
    assert (model.first_block == "closed_form") == (row == "vit_closed_form")
    assert model.card.trained_gamma == (0.27 if "jp" in row else 0)
    assert (model.card.img_size, model.card.resize, model.patch_size) == (56, 56, 7)
    embedding = model.patch_embed.proj.weight.detach().flatten(1)
    assert embedding.shape == (160, 147)
    assert torch.linalg.matrix_rank(embedding.double()) == 147  # so it can be inverted
    assert model.patch_embed.num_patches + 1 <= 160


@pytest.mark.parametrize("row", PATCH14_ROWS)
def test_the_patches_of_ten_pictures_are_fewer_than_the_width(row: str) -> None:
    """So a step of ten pictures of these models is within reach of the closed forms for batches."""
    model = load_model(f"patch14_{row}")
    assert (model.unk_embed is not None) == ("mjp" in row)
    assert model.card.trained_gamma == (0.27 if "mjp" in row else 0)
    assert (model.card.img_size, model.card.resize, model.patch_size) == (56, 56, 14)
    assert model.patch_embed.num_patches * 10 <= model.embed_dim == 160


def test_without_positions_a_jigsaw_changes_nothing() -> None:
    source = open_images("embedded")
    rows = measure(load_model("cifar_vit_no_pe"), source, source.records, Protocol(gammas=(0.27,)))
    assert (rows["consistency"] == 1).all()
