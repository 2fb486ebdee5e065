"""Whole trainings: they learn, go on where they stopped, and lose nothing to a mishap; what they
keep is verified before it is used: checkpoint, journal, weights."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.training import learner
from mjp_privacy.training.batches import World, find_examples
from mjp_privacy.training.learner import Learner
from mjp_privacy.training.trainer import is_lost, train
from tests.helpers.night import by_day
from tests.helpers.refusals import refused
from tests.helpers.segmentation import SWIN, pair_folder
from tests.helpers.segmentation import small as segmentation
from tests.helpers.training import (
    FILES,
    LAST_LINE_LOST,
    PICTURES_AS_THEY_ARE,
    class_folders,
    content,
    curve,
    die_after_line,
    small,
    stop_at,
    weights,
)
from tests.helpers.uploads import flip
from tests.inputs.tensors import with_state


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Labelled images of three classes."""
    return class_folders(tmp_path / "data")


@pytest.fixture
def here(data: Path, tmp_path: Path) -> dict[str, Any]:
    """Where a training of the labelled images is made."""
    return {"data": data, "out": tmp_path / "run", "device": "cpu", "workers": 0}


def facts(path: Path) -> dict[str, Any]:
    """What the file of a model says of it."""
    with safe_open(path, "pt") as file:
        return {k: json.loads(v) for k, v in file.metadata().items() if k != "mjp-seal"}


def state_of(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", weights_only=True)
    return state


def assert_same(run: Path, whole: Path) -> None:
    """Two trainings that drew the same curve and ended with the same weights."""
    assert curve(run) == curve(whole)
    torch.testing.assert_close(weights(run), weights(whole), rtol=0, atol=0)


# what comes out -----------------------------------------------------------------------------------


def test_a_run_learns_colours_and_exports_what_it_trained(here: dict[str, Any]) -> None:
    run, config = here["out"], small(recipe={"epochs": 12})
    path = train(config, **here, val=class_folders(here["out"].parent / "val"))
    lines = curve(run)
    assert (lines[-1]["val_top1"], lines[-1]["step"]) == (100.0, 72)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"epoch", "cross_entropy", "dal", "accuracy", "lr"} <= set(lines[0])
    assert (run / "curves.png").is_file()
    state, model = state_of(run), load_model(checkpoint=path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    card = model.card
    assert (card.img_size, card.resize, card.num_classes) == (28, 28, 3)
    assert (card.mean, card.std, card.trained_gamma) == ((0.5,) * 3, (0.25,) * 3, 0.5)
    assert (model.unk_embed is not None, model.dal_kind) == (True, "nonlinear")
    said = facts(path)
    assert said["recipe"]["recipe"]["epochs"] == 12
    assert (said["position_start"], said["position_decay"]) == ("N(0, 1)", True)
    assert said["made_with"][0]["threads"] == torch.get_num_threads()
    assert (said["seed"], said["steps"], said["val_top1"]) == (0, 72, 100.0)


BARE = {"unknown_embedding": False, "dal": "none"}


@pytest.mark.parametrize(
    "model",
    by_day(
        [
            {"dal": "linear"},
            {"dal": "pca"},
            {**BARE, "position_embedding": "none"},
            {**BARE, "first_block": "closed_form"},
        ],
        {0},
    ),
)
def test_other_models_come_back_as_they_were(here: dict[str, Any], model: dict[str, Any]) -> None:
    """Swins and ResNets: among the golden runs."""
    jigsaw = {"shuffle": "patches" if model["dal"] != "none" else "none"}
    config = small(model=model, jigsaw=jigsaw)
    loaded: Any = load_model(checkpoint=train(config, **here))
    trained = loaded.state_dict()
    for name, tensor in state_of(here["out"])["model"].items():
        assert torch.equal(trained[name], tensor)
    assert (loaded.dal_kind, loaded.first_block) == (config.model.dal, config.model.first_block)
    assert loaded.table.any() == (config.model.position_embedding != "none")
    assert loaded.card.trained_gamma == (0.5 if config.jigsaw.shuffle != "none" else 0)


def test_fine_tuning_starts_from_the_given_weights(here: dict[str, Any], tmp_path: Path) -> None:
    """The average of the weights, if it was kept; others are refused before any image is read."""
    plain = small(model=BARE, jigsaw={"shuffle": "none"}, recipe={"ema_decay": 0.5})
    start = train(plain, **here)
    state, exported = state_of(here["out"]), weights(here["out"])["head.weight"]
    assert torch.equal(exported, state["average"]["module.head.weight"])
    assert not torch.equal(exported, state["model"]["head.weight"])
    config = small(initial={"checkpoint": str(start)}, recipe={"lr": 0.0, "epochs": 1})
    other = {**here, "out": tmp_path / "tuned"}
    after = load_model(checkpoint=train(config, **other))
    before = dict(load_model(checkpoint=start).named_parameters())
    assert after.unk_embed is not None
    for name, parameter in after.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name]), name
    mean = before["pos_embed"][:, 1:].mean(1, keepdim=True)
    assert torch.allclose(after.unk_embed, mean, atol=1e-6)
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    other["out"] = tmp_path / "new"
    for image in here["data"].rglob("*.png"):
        image.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"other\.pth"):
        train(small(initial={"checkpoint": str(tmp_path / "other.pth")}), **other)


BFLOAT16 = {"precision": "bfloat16"}


def test_a_cpu_without_bfloat16_trains_in_float32_and_says_so(
    here: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(learner, "has_bfloat16", lambda: False)
    path = train(small(recipe=BFLOAT16), **here)
    assert capfd.readouterr().err.count("bfloat16") == 1
    assert facts(path)["made_with"][0]["products"] == "float32"
    train(small(), **{**here, "out": tmp_path / "float32"})
    assert_same(here["out"], tmp_path / "float32")


# killed, and given again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    by_day(
        [
            FILES,
            {"recipe": {"ema_decay": 0.9}},
            {"augmentation": {"mixup": 0.8, "cutmix": 1.0}, "log_every": 100},
            {"task": "segmentation", "recipe": {**BFLOAT16, "ema_decay": 0.5}},
            {"task": "segmentation", **SWIN},
        ],
        {0, 1},
    ),
)
def test_a_killed_run_draws_the_same_curve(
    here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Killed in a step; then when a line stands in the journal and in no checkpoint."""
    if "task" in changes:
        config, options = segmentation(**changes), {**here, "data": pair_folder(tmp_path / "ade")}
        kills = [(die_after_line, 2), (stop_at, 3)]
    else:
        config, options = small(**changes), {**here, "val": class_folders(tmp_path / "val")}
        kills = [(stop_at, 3), (die_after_line, 6), (stop_at, 9)]
    train(config, **{**options, "out": tmp_path / "whole"})
    for kill, step in kills:
        with monkeypatch.context() as patch:
            kill(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(config, **options)
    train(config, **options)
    assert_same(here["out"], tmp_path / "whole")


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_the_run_and_reach_no_checkpoint(
    here: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Also at the last step of a window: the loss was still finite, the weights are not."""
    step, backward, calls = Learner.train_step, Tensor.backward, itertools.count()

    def exploding(self: Learner, at: int, *batch: Tensor) -> Tensor:
        return step(self, at, *batch) * (float("nan") if at == 7 else 1)

    def infinite(self: Tensor, *rest: Any, **more: Any) -> None:
        backward(self * (float("inf") if next(calls) == 7 else 1.0), *rest, **more)

    with monkeypatch.context() as patch:
        if broken == "loss":
            patch.setattr(Learner, "train_step", exploding)
        else:
            patch.setattr(Tensor, "backward", infinite)
        with pytest.raises(UserError, match=r"step 8.*finite.*--lr"):
            train(small(), **here)
    state = state_of(here["out"])
    assert state["step"] == 6
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    again = small(initial={"checkpoint": str(here["out"] / "checkpoint.pt")})
    assert train(again, **{**here, "out": tmp_path / "again"}).is_file()


# images that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "used_for"), [({}, "validation"), (FILES, "training")])
def test_an_unreadable_image_is_named(
    here: dict[str, Any], tmp_path: Path, changes: dict[str, Any], used_for: str
) -> None:
    val = class_folders(tmp_path / "val", images=4)
    spoiled = here["data"] if used_for == "training" else val
    (spoiled / "class_1" / "003.png").write_bytes(b"no image")
    for workers in (0, 1):
        with pytest.raises(UserError, match=rf"class_1/003\.png.* {used_for} image"):
            train(small(**changes), **{**here, "workers": workers}, val=val)


def test_classes_must_be_the_models(here: dict[str, Any], tmp_path: Path) -> None:
    data, val = here["data"], class_folders(tmp_path / "val", images=2)
    (val / "class_1").rename(val / "class_9")
    part = small(model={"num_classes": 5}, data={"all_classes": False})
    for config, changes, named in (
        (small(model={"num_classes": 5}), {}, "label 3, 4"),
        (small(model={"num_classes": 2}), {}, "label 2"),
        (part, {}, r"labels\.csv"),
        (small(recipe={"batch": 50}), {}, "--batch 36"),
        (small(), {"data": data / "class_0"}, "--data"),
        (small(), {"val": val}, "--val"),
        (small(), {"val": data / "class_0" / ".."}, "--val: expected other"),
    ):
        with pytest.raises(UserError, match=named):
            train(config, **{**here, **changes})
    for form in ("0{}", "{}"):  # class folders are called by the index, and not by 007
        for label, folder in enumerate(sorted(data.iterdir())):
            folder.rename(data / form.format(label + 1))
        if form == "0{}":
            with pytest.raises(UserError, match="007"):
                train(part, **here)
    assert train(part, **here).is_file()
    for label, folder in enumerate(sorted(data.iterdir())):
        folder.rename(data / ("n01440764", "n01443537", "n01484850")[label])
    with pytest.raises(UserError, match=r"label 3, 4.*synset"):
        train(small(model={"num_classes": 5}), **{**here, "out": tmp_path / "synsets"})


def test_class_folders_may_hold_folders(tmp_path: Path) -> None:
    """The class is the outer one, also of validation images."""
    flat, nested = (class_folders(tmp_path / name, images=2) for name in ("flat", "nested"))
    for folder in nested.iterdir():
        for file in [*folder.iterdir()]:
            (folder / "images").mkdir(exist_ok=True)
            file.rename(folder / "images" / file.name)
    config = small(recipe={"batch": 2})
    assert find_examples(config, nested, flat)[1] is not None
    (shutil.copytree(nested, tmp_path / "val") / "class_1").rename(tmp_path / "val" / "class_9")
    with pytest.raises(UserError, match="class_2"):
        find_examples(config, nested, tmp_path / "val")


# the command --------------------------------------------------------------------------------------


def test_the_command_trains_a_row_and_says_what_is_wrong(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ImageNet's layout, which brings its own images to validate on; what it says next can be
    copied, from a folder whose name holds a blank."""
    files, config, run = tmp_path / "my pictures", tmp_path / "config.yaml", tmp_path / "run"
    files.mkdir()
    data.rename(files / "test")
    shutil.copytree(files / "test", files / "train")
    config.write_text(yaml.safe_dump({**content(), "rows": {"J": {}, "K": {"seed": 4}}}))
    where = ["train", str(config), "--data", str(files), "--device", "cpu", "--out", str(run)]
    assert main([*where, "--row", "K", "--epochs", "1"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}/model.safetensors\n"
    assert "val_top1" in curve(run)[-1]
    (line,) = (line for line in said.err.splitlines() if line.startswith("Next:"))
    following = shlex.split(line.removeprefix("Next:"))
    assert following[:3] == ["mjp", "attack", "own"]
    assert following[following.index("--images") + 1] == str(files)
    new = [*where[:-1], str(tmp_path / "new"), "--row", "K"]
    for words, named in (
        *((where, "--row"), ([*where, "--row", "K"], "recipe.epochs")),
        *(([*new, option, "0"], option.strip("-")) for option in ("--epochs", "--threads")),
        *(([*new, "--lr", "nan"], "lr"), ([*new, "--workers", "1000000"], "--workers")),
        *(([*new, option, "nowhere"], "nowhere") for option in ("--initial", "--val")),
    ):
        assert main(words) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "new" / "checkpoint.pt").exists()


# what is kept -------------------------------------------------------------------------------------


Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished training."""
    root = tmp_path_factory.mktemp("finished")
    train(small(), data=class_folders(root / "data"), out=root / "run", device="cpu", workers=0)
    return root / "run"


@pytest.fixture
def run(tmp_path: Path, finished: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flipped(path: Path) -> None:
    flip(path, 4 * path.stat().st_size)


def test_lost_weights_are_made_again_and_no_other_run_is_mixed_in(
    here: dict[str, Any], run: Path, finished: Path
) -> None:
    flipped(run / "model.safetensors")
    train(small(), **here)
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()
    with pytest.raises(UserError, match=r"jigsaw\.gamma .*0\.5.*0\.25"):
        train(small(jigsaw={"gamma": 0.25}), **here)
    with pytest.raises(UserError, match="--val"):
        train(small(), **here, val=class_folders(here["out"].parent / "val"))
    (here["data"] / "class_1" / "003.png").unlink()
    with pytest.raises(UserError, match="--data"):
        train(small(), **here)


def spoil(tensors: dict[str, Any], name: str) -> None:
    tensors[name].fill_(float("nan"))


WRONG: dict[str, tuple[str, Change]] = {
    "a bit": ("", flipped),
    "no config": ("config", lambda path: torch.save({}, path)),
    "too far": ("13", with_state(lambda s: s.update(step=13))),
    "no step": ("measured", with_state(lambda s: s.update(measured={"epoch": 1.0}))),
    "a shape": ("cls_token", with_state(lambda s: s["model"].update(cls_token=torch.zeros(1)))),
    "a value": ("cls_token", with_state(lambda s: spoil(s["model"], "cls_token"))),
    "no tensors": ("", with_state(lambda s: s["model"].clear())),
    "a moment": ("optimizer", with_state(lambda s: spoil(s["optimizer"]["state"][0], "exp_avg"))),
}


def test_a_checkpoint_that_is_wrong_is_named(here: dict[str, Any], run: Path) -> None:
    """Any bit of one: tests/inputs/test_readers.py."""
    path = run / "checkpoint.pt"
    whole = path.read_bytes()
    for kind, (named, change) in WRONG.items():
        path.write_bytes(whole)
        change(path)
        with pytest.raises(UserError) as caught:
            train(small(), **here)
        assert named in str(caught.value), kind
        assert "checkpoint.pt" in str(caught.value), kind
    assert (run / "model.safetensors").is_file()


# the journal --------------------------------------------------------------------------------------

NOISE = b'\xff\xfe\n[1]\n5\n{}\n{"step": true}\n{"step": -1}\n' + b"[" * 5000 + b"\n"


def test_damaged_lines_of_the_journal_are_left_out_and_a_lost_last_one_written_again(
    here: dict[str, Any], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit, what is no line, an unfinished last one: in no curve, and said."""
    path, words = run / "metrics.jsonl", ["curves", str(run), "--out", str(tmp_path / "out")]
    before, lines = path.read_bytes(), curve(run)
    for how, damage in LAST_LINE_LOST.items():
        path.write_bytes(damage(before))
        assert main(words) == 3, how
        (said,) = capsys.readouterr().err.splitlines()
        assert str(path) in said
        train(small(), **here)
        assert path.read_bytes() == before, how
        capsys.readouterr()
    assert main(words) == 0
    at = before.index(b'"cross_entropy": ') + len(b'"cross_entropy": ')
    changed = before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :]
    path.write_bytes(NOISE + changed + b'{"step": 1')
    assert curve(run) == lines[1:]
    for code, command in ((3, lambda: main(words)), (None, lambda: train(small(), **here))):
        assert command() == code or code is None
        assert "metrics.jsonl: 8 " in capsys.readouterr().err
    assert curve(run) == lines[1:]
    assert b"\xff" not in path.read_bytes()


def test_curves_are_drawn_once_over_nobodys_files_and_of_trainings_alone(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier picture is replaced; no training is written into another command's folder."""
    out, same = tmp_path / "out", run.parent / "data" / ".." / run.name
    refused(capsys, str(run), "curves", run, same, "--out", out)
    refused(capsys, "checkpoint.pt", "curves", run, "--out", run)
    assert [main(["curves", str(run), "--out", str(out)]) for _ in range(2)] == [0, 0]
    (out / "photo.png").touch()
    refused(capsys, "photo.png", "curves", run, "--out", out)
    refused(capsys, "got none", "curves", "--out", tmp_path / "new")
    for wrong in (b"", NOISE, b'{"step": 1, "epoch": 1}\n'):
        (run / "metrics.jsonl").write_bytes(wrong)
        refused(capsys, "metrics.jsonl", "curves", run, "--out", tmp_path / "new")
    assert not (tmp_path / "new" / "curves.png").exists()
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content()))
    for file in ("federation.json", "experiment.yaml"):
        folder = tmp_path / file.partition(".")[0]
        folder.mkdir()
        (folder / file).touch()
        refused(capsys, str(folder), "train", config, "--data", data, "--out", folder)
        refused(capsys, str(folder), "curves", folder, "--out", tmp_path / "new")
        assert [path.name for path in folder.iterdir()] == [file]


# several processes --------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]


def torchrun(
    fields: dict[str, Any], out: Path, *words: object, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`mjp train` of a config with these fields, each process with one thread."""
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(fields))
    argv = [sys.executable, *launcher, "-m", "mjp_privacy", "train", config, "--out", out, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    alone = ["--device", "cpu", "--threads", "1"]
    return subprocess.run(
        [*map(str, argv), *alone], cwd=ROOT, env=env, timeout=200, capture_output=True, text=True
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("used_for", "precision", "workers"),
    [("training", "float32", 1), ("validation", "bfloat16", 0)],
)
def test_an_error_of_one_process_ends_all_with_its_reason(
    tmp_path: Path, used_for: str, precision: str, workers: int
) -> None:
    """A picture in one process's share is damaged: nobody waits for a process that has left, and
    the same command goes on when the picture is repaired, as one process does; without drop path,
    mixup and the like, which each process draws."""
    fields = content(
        augmentation=PICTURES_AS_THEY_ARE,
        data={"store": "files"},
        model={"drop_path": 0},
        recipe={"precision": precision},
        jigsaw={"first_epoch": 0},
    )
    fields |= {"log_every": 1, "checkpoint_minutes": 0.0003}  # due at other steps by each clock
    data, val = class_folders(tmp_path / "data"), class_folders(tmp_path / "val", images=7)
    picture = (data if used_for == "training" else val) / "class_0" / "003.png"
    whole, one, two = picture.read_bytes(), tmp_path / "one", tmp_path / "two"
    words = ("--data", data, "--val", val, "--workers", workers)
    picture.write_bytes(whole[: len(whole) // 2])
    failed = torchrun(fields, two, *words, launcher=TORCHRUN)
    assert failed.returncode == 1
    assert failed.stderr.count(f"{picture.name}: ") == 1
    picture.write_bytes(whole)
    assert torchrun(fields, two, *words, launcher=TORCHRUN).returncode == 0
    assert torchrun(fields, one, *words).returncode == 0
    here, there = ([line["loss"] for line in curve(run)] for run in (one, two))
    # in bfloat16 half a batch's gradients are rounded
    assert there == pytest.approx(here, abs=1e-5 if precision == "float32" else 5e-3)


def test_only_what_a_lost_process_leaves_is_taken_for_one() -> None:
    world, lost = World(torch.device("cpu"), 0, 2), "tcp/pair.cc:547] Connection closed by peer"
    assert is_lost(RuntimeError(lost), world)
    assert not is_lost(UserError(lost), world)
    assert not is_lost(RuntimeError(lost), World(world.device))
    assert not is_lost(RuntimeError("Duplicate GPU detected"), world)


MIXED = {"recipe": {"batch": 9}, "augmentation": {"mixup": 0.8}}
HERE = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


def test_an_environment_that_torchrun_does_not_make_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two = {"WORLD_SIZE": "2"}
    cases: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"WORLD_SIZE": "0"}, {}, "WORLD_SIZE"),
        (two, {}, "torchrun"),
        (two | HERE | {"MASTER_PORT": "99999999"}, {}, "torchrun"),
        (two | {"LOCAL_RANK": "1", "device": "cuda"}, {}, "--nproc_per_node=1"),
        ({"WORLD_SIZE": "4"}, {}, "--batch 4"),
        ({"WORLD_SIZE": "3"}, MIXED, "--batch 6"),
    ]
    for place, changes, named in cases:
        with monkeypatch.context() as patch:
            for name in ("LOCAL_RANK", *HERE):
                patch.delenv(name, raising=False)
            for name, value in place.items():
                patch.setenv(name, value)
            given = {"data": data, "out": tmp_path / "run", "device": place.get("device", "cpu")}
            with pytest.raises(UserError, match=named):
                train(small(**changes), **given)  # type: ignore[arg-type]
