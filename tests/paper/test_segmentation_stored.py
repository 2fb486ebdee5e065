"""Files of segmentations and the weights that they start from: what is refused, what is stated."""

import itertools
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.tensor_files import DIGEST_KEY
from mjp_privacy.paper.segmentation_network import load_segmentation
from mjp_privacy.training.config import TrainingConfig
from mjp_privacy.training.trainer import train
from tests.helpers.night import by_day
from tests.helpers.segmentation import SWIN, pair_folder, small
from tests.helpers.training import class_folders
from tests.helpers.training import small as classifier

PLAIN = {"model": {"unknown_embedding": False, "dal": "none"}, "jigsaw": {"shuffle": "none"}}
"""Changes that take MJP out of the small classifier."""


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    return pair_folder(tmp_path / "ade")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one short training."""
    root = tmp_path_factory.mktemp("once")
    return trained(small(recipe={"epochs": 1}), pair_folder(root / "ade"), root / "run")


@pytest.fixture
def path(once: Path, tmp_path: Path) -> Path:
    """A copy of that file."""
    return Path(shutil.copy(once, tmp_path))


def trained(config: TrainingConfig, ade: Path, out: Path) -> Path:
    return train(config, data=ade, out=out, device="cpu", workers=0)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def rewritten(path: Path, recipe: Any = None, **tensors: torch.Tensor | None) -> Path:
    """A copy without a seal whose metadata states another recipe; None takes a tensor out."""
    metadata = {key: value for key, value in metadata_of(path).items() if key != DIGEST_KEY}
    if recipe is not None:
        metadata["recipe"] = json.dumps(recipe)
    with safe_open(path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}
    kept = {name: value for name, value in {**kept, **tensors}.items() if value is not None}
    copy = path.with_name("other.safetensors")
    save_file(kept, copy, metadata)
    return copy


@pytest.mark.nightly
def test_tasks_in_the_files_of_others_mean_nothing(tmp_path: Path) -> None:
    own = train(
        classifier(recipe={"epochs": 1}),
        data=class_folders(tmp_path / "classes"),
        out=tmp_path / "run",
        device="cpu",
    )
    with safe_open(own, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    stated = {key: value for key, value in metadata_of(own).items() if key != DIGEST_KEY}
    theirs = tmp_path / "theirs.safetensors"
    for task in ("image-classification", "segmentation", '"image-segmentation"'):
        save_file(tensors, theirs, {**stated, "task": task})
        assert load_model(checkpoint=theirs).num_classes == 3
    save_file(tensors, theirs, {**stated, "task": '"segmentation"'})
    with pytest.raises(UserError, match='holds a network for "segmentation": expected a class'):
        load_model(checkpoint=theirs)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"segmentation": {"head": "upernet", "channels": 16_384}}, "less than or equal to 2048"),
    (
        {"segmentation": {"head": "upernet", "channels": 2048}},
        r"weight: expected \(3, 2048, 1, 1\), got \(3, 16, 1, 1\)",
    ),
    ({"model": {"embed_dim": 16_000, "depth": 48}}, "a network of these sizes has about"),
    ({"model": {"embed_dim": 6400, "depth": 40}}, r"expected \(6400,\), got \(16,\)"),
    ({"family": "swin"}, "stages are the blocks in each stage of a swin"),
    ({"segmentation": {"head": "upernet"}, "model": {"depth": 3}}, "expected depth 4 or more"),
    ({"model": {"img_size": 18}}, "expected img_size divisible by patch_size"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_a_file_that_states_other_sizes_is_refused_before_memory_is_taken(
    path: Path, changes: dict[str, Any], said: str
) -> None:
    recipe = json.loads(metadata_of(path)["recipe"])
    recipe.setdefault("family", "vit")
    for name, value in changes.items():
        recipe[name] = {**recipe[name], **value} if isinstance(value, dict) else value
    wrong = rewritten(path, recipe)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=said) as caught:
        load_segmentation(str(wrong))
    assert "other.safetensors" in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000_000 / 1024


def test_a_tensor_of_one_number_is_shown_by_its_shape(path: Path) -> None:
    with pytest.raises(UserError, match=r"aaa: expected no such tensor, got \(\)\. Give"):
        load_segmentation(str(rewritten(path, aaa=torch.tensor(1.0))))
    with pytest.raises(UserError, match=r"bias: expected \(3,\), got no such tensor\. Give"):
        load_segmentation(str(rewritten(path, **{"head.classifier.bias": None})))


def test_a_head_of_too_many_channels_is_refused() -> None:
    with pytest.raises(UserError, match=r"channels: Input should be less than or equal to 2048"):
        small(segmentation={"head": "upernet", "channels": 2049})


def test_tables_that_do_not_decay_are_stated_as_such(ade: Path, tmp_path: Path) -> None:
    config = small(
        model={"unknown_embedding": True},
        jigsaw={"position_init": "paper"},
        recipe={"epochs": 1},
    )
    assert config.positions_as_paper
    assert metadata_of(trained(config, ade, tmp_path / "run"))["position_decay"] == "false"


def starting_weights(tmp_path: Path, *, mjp: bool, swin: bool) -> Path:
    """A classifier of the small segmentation's sizes, with E_unk or without."""
    changes: dict[str, Any] = {} if mjp else {name: dict(part) for name, part in PLAIN.items()}
    shape = {"patch_size": 4, "depth": 4, "img_size": 8}
    if swin:
        shape = {"patch_size": 4, "img_size": 56, "embed_dim": 8, "num_heads": 2}
        changes |= {"family": "swin", "stages": [1, 1], "data": {"native_size": 28}}
    changes["model"] = {**changes.get("model", {}), **shape}
    config = classifier(recipe={"epochs": 1}, **changes)
    data = class_folders(tmp_path / "classes")
    return train(config, data=data, out=tmp_path / "classifier", device="cpu")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mjp", "swin"), by_day(itertools.product([False, True], [False, True]), {1, 2})
)
def test_weights_under_the_name_of_others_are_refused(
    ade: Path, tmp_path: Path, mjp: bool, swin: bool
) -> None:
    path = starting_weights(tmp_path, mjp=mjp, swin=swin)
    shape = {**SWIN["model"], "img_size": 112} if swin else {}
    family = {"family": "swin", "stages": [1, 1]} if swin else {}
    started: dict[str, Any] = {"initial": {"checkpoint": str(path)}, **family}
    other = small(model={**shape, "unknown_embedding": not mjp}, **started)
    said = (
        r"unknown_embedding is false: expected .* no unk_embed, got MJP's unk_embed. Give weights "
        "trained without MJP"
        if mjp
        else r"unknown_embedding is true: expected .* MJP's unk_embed, got no unk_embed. Give "
        "weights trained with MJP"
    )
    with pytest.raises(UserError, match=said):
        trained(other, ade, tmp_path / "refused")
    fitting = small(model={**shape, "unknown_embedding": mjp}, recipe={"epochs": 1}, **started)
    assert trained(fitting, ade, tmp_path / "run").is_file()


def test_packaged_weights_are_part_of_a_segmentations_identity(ade: Path, tmp_path: Path) -> None:
    sizes = {"patch_size": 7, "img_size": 56, "embed_dim": 160, "depth": 4, "num_heads": 5}
    pixels = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
    config = small(
        model={**sizes, **pixels},
        recipe={"epochs": 1},
        initial={"checkpoint": "packaged:cifar_vit"},
    )
    path = trained(config, ade, tmp_path / "run")
    stated = load_model(checkpoint="packaged:cifar_vit").card.checkpoint.sha256
    assert json.loads(metadata_of(path)["initial_sha256"]) == stated
    assert len(stated) == 64


def test_options_that_segmentation_does_not_read_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (
        ("--preset", "authors_code"),
        ("--img-size", "32"),
        ("--mean", "0.5"),
        ("--std", "0.5"),
        ("--position-embedding", "strict"),
        ("--paper-row", "J"),
        ("--gamma", "0.5"),
        ("--model", "deit_small"),
        ("--labels", "x.csv"),
        ("--unknown-embedding", "False"),
    ):
        words = ["evaluate", "--checkpoint", "x", "--ade20k", str(tmp_path), option, value]
        assert main(words) == 2
        assert f"--device and --out beside it, got {option}." in capsys.readouterr().err
