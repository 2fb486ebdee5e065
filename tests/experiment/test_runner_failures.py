"""Failures are rows with a reason; the rest goes on; what is mended completes the same run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from attacks.april import April
from mjp_privacy import load_model
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.interfaces import AttackerView, ClientInput, ClientUpdate, Reconstruction
from mjp_privacy.report.write import write_report
from tests.helpers.runs import (
    MJP,
    TINY,
    attack,
    cell,
    cells,
    names,
    one_cell,
    photograph,
    photographs,
    rows,
    same_rows,
    tensors,
    tiny,
    written,
)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return photographs(tmp_path / "images")


def outcome(out: Path, run_id: str | None = None) -> dict[str, tuple[str, str]]:
    """Status and reason of every image's scores; each has one of each."""
    found = rows(out, None if run_id is None else [run_id])
    found = found[found["metric"] != "top1"]
    said = found[["image_id", "status", "reason"]].drop_duplicates().set_index("image_id")
    assert said.index.is_unique
    return {str(i): (row["status"], row["reason"]) for i, row in said.iterrows()}


# images -------------------------------------------------------------------------------------------


def test_images_that_cannot_be_used_are_rows_with_a_reason(images: Path, tmp_path: Path) -> None:
    good = {name: (images / name).read_bytes() for name in ("1.png", "2.png", "3.png", "4.png")}
    (images / "1.png").write_bytes(b"no image")
    (images / "2.png").write_bytes(b"")
    Image.new("RGB", (100, 7)).save(images / "3.png")
    (images / "4.png").write_bytes(good["4.png"][:200])
    run = tmp_path / "run"
    summary = attack(images, run, one_cell())
    assert summary.exit_code == 3
    assert len(summary.failures) == 4
    said = outcome(run)
    assert {name: status for name, (status, _) in said.items()} == {
        "0.png": "ok",
        **dict.fromkeys(good, "unreadable"),
        "5.png": "ok",
    }
    expected = {
        "1.png": "not an image",
        "2.png": "empty",
        "3.png": "too small: short side 7 px, at least 8 px",
        "4.png": "cannot be decoded",
    }
    for name, text in expected.items():
        assert text in said[name][1]
        assert any(failure.startswith(f"{name}: ") for failure in summary.failures)
    failed = rows(run)[lambda r: r["status"] == "unreadable"]
    assert len(failed) == 4 * 12  # ten scores and two accuracies
    assert failed["value"].isna().all()
    assert set(tensors(run, cells(run)[0]["run_id"])) == {"0.png", "5.png"}

    for name, content in good.items():
        (images / name).write_bytes(content)
    assert attack(images, run, one_cell()).exit_code == 0
    assert set(outcome(run).values()) == {("ok", "")}
    attack(images, tmp_path / "fresh", one_cell())
    same_rows(run, tmp_path / "fresh")
    assert set(tensors(run, cells(run)[0]["run_id"])) == set(names(6))
    files = written(run)
    attack(images, run, one_cell())
    assert written(run) == files


def test_a_run_without_a_single_usable_image_is_a_table_of_failures(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    assert attack(folder, tmp_path / "run", one_cell()).exit_code == 3
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    assert summary.any_failed
    assert "the file is empty" in (tmp_path / "report" / "table.md").read_text()


def test_an_image_too_small_for_one_model_is_scored_by_the_other(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", 2, labelled=False)
    photograph(7, (12, 12)).save(folder / "small.png")
    models = {"8": TINY, "16": {**TINY, "patch_size": 16}}
    for order in (["8", "16"], ["16", "8"]):
        run = tmp_path / "-".join(order)
        config = one_cell(
            models={name: models[name] for name in order},
            grid=[{"models": order, "settings": ["a"]}],
        )
        assert attack(folder, run, config).exit_code == 3
        assert outcome(run, cell(run, model="8")["run_id"])["small.png"] == ("ok", "")
        assert outcome(run, cell(run, model="16")["run_id"])["small.png"][0] == "unreadable"
        assert "small.png,,none" in (run / "images.csv").read_text()
        assert ",failed," not in (run / "images.csv").read_text()


def test_a_client_step_falls_with_its_image(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shipped attack takes batch 2, so one is made to: the steps stay those of the order."""
    fed: list[tuple[str, ...]] = []

    def run(self: April, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        return Reconstruction(
            torch.full((2 * len(view.updates[0].grads["pos_embed"]), 3, 32, 32), 0.5)
        )

    update = FedSGDClient.update

    def noted(self: FedSGDClient, inputs: ClientInput, **arguments: Any) -> ClientUpdate:
        fed.append(tuple(inputs.image_ids))
        return update(self, inputs, **arguments)

    monkeypatch.setattr(April, "unsupported", lambda self, view: None)
    monkeypatch.setattr(April, "run", run)
    monkeypatch.setattr(FedSGDClient, "update", noted)
    config = one_cell(client={"batch": 2}, block=6)
    attack(images, tmp_path / "order", config)
    order = fed.pop()
    good = (images / order[2]).read_bytes()
    (images / order[2]).write_bytes(b"")
    assert attack(images, tmp_path / "run", config).exit_code == 3
    assert fed.pop() == (*order[:2], *order[4:])
    said = outcome(tmp_path / "run")
    assert said[order[2]] == ("unreadable", "the file is empty (0 bytes)")
    reason = f"its client step also holds {order[2]}, which cannot be used"
    assert said[order[3]] == ("unreadable", reason)
    (images / order[2]).write_bytes(good)
    assert attack(images, tmp_path / "run", config).exit_code == 0
    assert fed.pop() == tuple(order)  # the whole block again: its numbers move with the batch
    assert set(outcome(tmp_path / "run").values()) == {("ok", "")}


# checkpoints and labels ---------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    state = load_model(**{**MJP, "seed": 5}).state_dict()
    save_file(state, tmp_path / "mjp.safetensors")
    return tmp_path / "mjp.safetensors"


def waiting() -> dict[str, Any]:
    """ViT runs; MJP has no checkpoint yet."""
    return tiny(models={"ViT": TINY, "MJP": {**MJP, "checkpoint": None}})


def test_a_cell_without_a_checkpoint_fails_alone_and_is_made_good(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    summary = attack(images, run, waiting())
    assert summary.exit_code == 3
    assert len(summary.failures) == 1
    assert re.match(r"MJP: .*needs a checkpoint.*Give checkpoint=PATH", summary.failures[0])
    status = [(e["model"], e["setting"], e["status"]) for e in cells(run)]
    table = [("ViT", "a", "ok"), ("ViT", "b", "ok")]
    assert status == [*table, *(("MJP", setting, "failed") for setting in "abc")]
    for entry in cells(run):
        expected = ("ok", "") if entry["model"] == "ViT" else ("failed", entry["reason"])
        assert outcome(run, entry["run_id"]) == dict.fromkeys(names(6), expected)
    report = write_report([run], tmp_path / "report")
    assert (report.lines, report.failed_lines) == (5, 3)

    done = {name: time for name, time in written(run).items() if name.startswith("reconstr")}
    assert attack(images, run, waiting(), weights=(f"MJP={weights}",)).exit_code == 0
    assert done.items() <= written(run).items()
    assert [e["status"] for e in cells(run)] == ["ok"] * 5
    assert cell(run, model="MJP", setting="c")["checkpoint"] == "mjp.safetensors"
    assert set(rows(run)["status"]) == {"ok"}
    report = write_report([run], tmp_path / "report")
    assert (report.lines, report.failed_lines) == (5, 0)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: None, "No checkpoint at"),
        (lambda path: path.write_bytes(b"no tensors"), "no safetensors file at all"),
        (lambda path: path.mkdir(), "No checkpoint at"),
        (lambda path: save_file({"x": torch.zeros(1)}, path), "not a plain ViT classifier"),
    ],
)
def test_a_wrong_checkpoint_is_a_reason(
    images: Path, tmp_path: Path, write: Callable[[Path], object], said: str
) -> None:
    path = tmp_path / "given.safetensors"
    write(path)
    summary = attack(images, tmp_path / "run", waiting(), weights={"MJP": path})
    assert summary.exit_code == 3
    assert said in summary.failures[0]
    assert {e["model"]: e["status"] for e in cells(tmp_path / "run")} == {
        "ViT": "ok",
        "MJP": "failed",
    }


def test_a_path_of_a_checkpoint_does_not_enter_the_run_id(
    images: Path, weights: Path, tmp_path: Path
) -> None:
    attack(images, tmp_path / "run", waiting(), weights=(f"MJP={weights}",), limit=1)
    before, files = cells(tmp_path / "run"), written(tmp_path / "run")
    moved = weights.rename(tmp_path / "moved.safetensors")
    attack(images, tmp_path / "run", waiting(), weights=(f"MJP={moved}",), limit=1)
    assert [e["run_id"] for e in cells(tmp_path / "run")] == [e["run_id"] for e in before]
    assert written(tmp_path / "run") == files


def test_labels_that_are_no_classes_of_the_model_fail_its_cells(
    images: Path, tmp_path: Path
) -> None:
    config = one_cell(
        models={"ten": TINY, "three": {**TINY, "num_classes": 3}},
        grid=[{"models": ["three", "ten"], "settings": ["a"]}],
    )
    run = tmp_path / "run"
    summary = attack(images, run, config)
    assert summary.exit_code == 3
    assert set(rows(run, [cell(run, model="ten")["run_id"]])["status"]) == {"ok"}
    reason = cell(run, model="three")["reason"]
    assert re.match(r"Image \d.png has label \d, but the model has 3 classes, 0 to 2 \(3", reason)
    assert "--labels" in reason
    assert set(outcome(run, cell(run, model="three")["run_id"]).values()) == {("failed", reason)}


@pytest.mark.parametrize(
    ("change", "said"),
    [({"img_size": 16}, "at least 31×31 pixels"), ({"resize": 8}, "1 ≤ size ≤ resize")],
)
def test_a_model_that_cannot_be_scored_or_fed_fails_alone(
    images: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    config = one_cell(
        models={"bad": TINY | change, "good": TINY},
        grid=[{"models": ["bad", "good"], "settings": ["a"]}],
    )
    summary = attack(images, tmp_path / "run", config)
    assert summary.exit_code == 3
    assert all(said in failure for failure in summary.failures)
    bad, good = (cell(tmp_path / "run", model=label)["run_id"] for label in ("bad", "good"))
    assert set(outcome(tmp_path / "run", good).values()) == {("ok", "")}
    statuses = outcome(tmp_path / "run", bad)
    assert {status for status, _ in statuses.values()} == {"failed"}
    assert all(said in reason for _, reason in statuses.values())


# numbers that break down --------------------------------------------------------------------------


def broken_for(monkeypatch: pytest.MonkeyPatch, image_id: str, bad: float) -> None:
    """The client's gradient of one image is not finite."""
    update = FedSGDClient.update

    def spoiled(self: FedSGDClient, inputs: ClientInput, **arguments: Any) -> ClientUpdate:
        made = update(self, inputs, **arguments)
        if image_id in inputs.image_ids:
            at = list(inputs.image_ids).index(image_id)
            for grad in made.grads.values():
                grad[at] = bad
        return made

    monkeypatch.setattr(FedSGDClient, "update", spoiled)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_fails_its_image_alone(
    images: Path, tmp_path: Path, bad: float
) -> None:
    config = tiny(dtypes=["float64"])
    attack(images, tmp_path / "whole", config)
    with pytest.MonkeyPatch.context() as patch:
        broken_for(patch, "2.png", bad)
        summary = attack(images, tmp_path / "run", config)
    assert summary.exit_code == 3
    assert len(summary.failures) == 5
    assert all("2.png" in failure for failure in summary.failures)
    for entry in cells(tmp_path / "run"):
        said = outcome(tmp_path / "run", entry["run_id"])
        assert said.pop("2.png")[0] == "failed"
        assert set(said.values()) == {("ok", "")}
        assert "2.png" not in tensors(tmp_path / "run", entry["run_id"])
        for image_id, stored in tensors(tmp_path / "run", entry["run_id"]).items():
            expected = tensors(tmp_path / "whole", entry["run_id"])[image_id]["images"]
            torch.testing.assert_close(stored["images"], expected, atol=1e-3, rtol=0)
    assert attack(images, tmp_path / "run", config).exit_code == 0  # not finished: done again
    assert set(rows(tmp_path / "run")["status"]) == {"ok"}


def test_a_reconstruction_that_is_not_finite_fails_its_image_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = April.run

    def spoiled(self: April, view: AttackerView, **arguments: Any) -> Reconstruction:
        found = run(self, view, **arguments)
        assert found.images is not None
        found.images[0, 0, 3, 4] = torch.nan
        return found

    monkeypatch.setattr(April, "run", spoiled)
    summary = attack(images, tmp_path / "run", one_cell())
    said = outcome(tmp_path / "run")
    failed = [name for name, (status, _) in said.items() if status == "failed"]
    assert len(failed) == 2  # the first of each block of three
    assert all(said[name][1] == "the reconstruction is not finite" for name in failed)
    assert summary.exit_code == 3
    assert [status for status, _ in said.values()].count("ok") == 4


def test_linear_algebra_that_breaks_down_everywhere_fails_every_image(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: April, view: AttackerView, **arguments: Any) -> Reconstruction:
        raise torch.linalg.LinAlgError("the SVD did not converge")

    monkeypatch.setattr(April, "run", broken)
    summary = attack(images, tmp_path / "run", one_cell())
    assert summary.exit_code == 3
    assert len(summary.failures) == 6
    reason = "the attack's linear algebra broke down: the SVD did not converge"
    assert outcome(tmp_path / "run") == dict.fromkeys(names(6), ("failed", reason))
