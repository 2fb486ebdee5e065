"""Failures are rows with a reason; the rest goes on; what is mended completes the same run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mjp_privacy import load_model
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment import simulated
from mjp_privacy.interfaces import ClientInput, ClientUpdate
from tests.helpers.runs import (
    MJP,
    TINY,
    attack,
    cell,
    cells,
    logged,
    names,
    one_cell,
    outcome,
    photograph,
    photographs,
    rows,
    same_results,
    tensors,
    tiny,
    values,
    written,
)


@pytest.fixture
def own(images: Path, tmp_path: Path) -> Path:
    """A copy of the photographs to spoil."""
    return Path(shutil.copytree(images, tmp_path / "images"))


def statuses(out: Path, **wanted: Any) -> dict[str, str]:
    return {name: status for name, (status, _) in outcome(out, **wanted).items()}


SPAN = [{"name": "patch_gradient"}]
TWO = [{"models": ["bad", "good"], "settings": ["a"]}]
"""Two models in setting a."""


# images -------------------------------------------------------------------------------------------


def test_images_that_cannot_be_used_are_rows_with_a_reason(own: Path, tmp_path: Path) -> None:
    good = {name: (own / name).read_bytes() for name in ("1.png", "2.png", "3.png", "4.png")}
    (own / "1.png").write_bytes(b"no image")
    (own / "2.png").write_bytes(b"")
    Image.new("RGB", (100, 7)).save(own / "3.png")
    (own / "4.png").write_bytes(good["4.png"][:200])
    run = tmp_path / "run"
    summary = attack(own, run, one_cell())
    assert summary.exit_code == 3
    told = outcome(run)
    unreadable = {name for name, (status, _) in told.items() if status == "unreadable"}
    assert unreadable == set(good)
    assert {status for name, (status, _) in told.items() if name not in good} == {"ok"}
    assert len({told[name][1] for name in good}) == 4
    assert "7 px" in told["3.png"][1]
    for name in good:
        assert [line for line in summary.failures if line.startswith(f"{name}: ")]
    assert rows(run)[lambda r: r["status"] == "unreadable"]["value"].isna().all()
    assert set(tensors(run, cells(run)[0]["run_id"])) == {"0.png", "5.png"}

    for name, content in good.items():
        (own / name).write_bytes(content)
    assert attack(own, run, one_cell()).exit_code == 0
    attack(own, tmp_path / "fresh", one_cell())
    same_results(run, tmp_path / "fresh")
    files = written(run)
    attack(own, run, one_cell())
    assert written(run) == files


def test_with_a_limit_another_file_takes_the_place_of_one_that_is_no_image(
    own: Path, tmp_path: Path
) -> None:
    for name in ("0.png", "3.png"):
        (own / name).write_bytes(b"no image")
    summary = attack(own, tmp_path / "run", one_cell(attacks=SPAN), limit=3)
    assert summary.images == 3
    assert set(statuses(tmp_path / "run").values()) == {"ok"}
    assert summary.exit_code == (3 if summary.failures else 0)
    assert attack(own, tmp_path / "run", one_cell(attacks=SPAN), limit=4).failures


def test_a_client_step_falls_with_its_image(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps stay those of the order, and a mended image brings its whole block back."""
    fed: list[tuple[str, ...]] = []
    update = FedSGDClient.update

    def noted(self: FedSGDClient, inputs: ClientInput, **arguments: Any) -> ClientUpdate:
        fed.append(tuple(inputs.image_ids))
        return update(self, inputs, **arguments)

    monkeypatch.setattr(FedSGDClient, "update", noted)
    config = one_cell(client={"batch": 2}, block=6, attacks=SPAN)
    attack(own, tmp_path / "order", config)
    order = fed.pop()
    good = (own / order[2]).read_bytes()
    (own / order[2]).write_bytes(b"")
    assert attack(own, tmp_path / "run", config).exit_code == 3
    assert fed.pop() == (*order[:2], *order[4:])
    told = outcome(tmp_path / "run")
    assert [told[name][0] for name in order] == ["ok", "ok", *["unreadable"] * 2, "ok", "ok"]
    assert order[2] in told[order[3]][1]
    (own / order[2]).write_bytes(good)
    assert attack(own, tmp_path / "run", config).exit_code == 0
    assert fed.pop() == tuple(order)  # its numbers move with the batch
    assert set(statuses(tmp_path / "run").values()) == {"ok"}


# models -------------------------------------------------------------------------------------------


def waiting() -> dict[str, Any]:
    """ViT runs; MJP has no checkpoint yet."""
    return tiny(models={"ViT": TINY, "MJP": {**MJP, "checkpoint": None}}, attacks=SPAN)


def test_a_model_without_a_checkpoint_fails_alone_and_is_made_good(
    three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = tmp_path / "run", tmp_path / "mjp.safetensors"
    summary = attack(three, run, waiting())
    assert summary.exit_code == 3
    assert len(summary.failures) == len(summary.failed_because) == 1
    assert summary.failures[0].startswith("MJP: ")
    status = [(e["model"], e["setting"], e["status"]) for e in cells(run)]
    table = [("ViT", "a", "ok"), ("ViT", "b", "ok")]
    assert status == [*table, *(("MJP", setting, "failed") for setting in "abc")]
    for entry in cells(run):
        expected = ("ok", "") if entry["model"] == "ViT" else ("failed", entry["reason"])
        assert set(outcome(run, run_id=entry["run_id"]).values()) == {expected}

    done = written(run)
    save_file(load_model(**{**MJP, "seed": 5}).state_dict(), path)
    assert attack(three, run, waiting(), weights=(f"MJP={path}",)).exit_code == 0
    of_vit = [entry["run_id"] for entry in cells(run) if entry["model"] == "ViT"]
    assert {n: t for n, t in done.items() if n.split("/")[1] in of_vit}.items() <= (
        written(run).items()
    )
    assert [e["status"] for e in cells(run)] == ["ok"] * 5
    assert cell(run, model="MJP", setting="c")["checkpoint"] == "mjp.safetensors"
    assert set(rows(run)["status"]) == {"ok"}

    before, files = cells(run), written(run)  # the path of a checkpoint is no part of a run_id
    moved = path.rename(tmp_path / "moved.safetensors")
    attack(three, run, waiting(), weights={"MJP": moved})
    assert [e["run_id"] for e in cells(run)] == [e["run_id"] for e in before]
    assert written(run) == files


State = dict[str, torch.Tensor]
Change = Callable[[State], object]
FACTS = {"num_heads": 3, "mean": 0.5, "std": 0.5, "img_size": 32}


def weights(path: Path, change: Change | None = None) -> str:
    state = {n: p.detach().clone() for n, p in load_model(**TINY).named_parameters()}
    if change is not None:
        change(state)
    save_file(state, path)
    return str(path)


BAD: dict[str, tuple[Change, str]] = {
    "NaN": (lambda s: s["norm.weight"].fill_(float("nan")), "norm.weight"),
    "types": (lambda s: s.update({"norm.bias": s["norm.bias"].to(torch.int8)}), "int8"),
    "names": (lambda s: s.update({"blocks.foo.weight": torch.zeros(1)}), "blocks.foo.weight"),
    "rows": (lambda s: s.update({"pos_embed": torch.zeros(1, 0, 192)}), "pos_embed"),
    "other": (lambda s: (s.clear(), s.update({"x": torch.zeros(1)})), "given.safetensors"),
}


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"num_classes": 2}, "2.png"),
    "resize": ({"resize": 8}, "resize"),
}
"""Sound models that cannot take the images or their labels, and what is said of them."""


def spoil(path: Path, how: str) -> str:
    """Put something that is no model there; what is said of it."""
    if how == "nothing":
        return path.name
    if how == "a pipe":
        os.mkfifo(path)
        return "pipe"
    if how == "a folder":
        path.mkdir()
        return path.name
    change, named = BAD.get(how, (None, path.name))
    weights(path, change)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    return named


def test_bad_models_are_rows_and_the_others_go_on(three: Path, tmp_path: Path) -> None:
    named, models = {}, {"good": TINY}
    for how in [*BAD, "nothing", "a pipe", "a folder", "cut off"]:
        path = tmp_path / how / "given.safetensors"
        path.parent.mkdir()
        named[how], models[how] = spoil(path, how), {**FACTS, "checkpoint": str(path)}
    for how, (change, words) in UNFIT.items():
        named[how], models[how] = words, TINY | change
    grid = [{"models": [*models], "settings": ["a"]}]
    config = one_cell(models=models, grid=grid, attacks=[{"name": "grey"}])
    summary = attack(three, tmp_path / "run", config)
    assert summary.exit_code == 3
    for how, words in named.items():
        assert [line for line in summary.failures if line.startswith(f"{how}: ") and words in line]
        assert cell(tmp_path / "run", model=how)["status"] == "failed"
        ((status, reason),) = set(outcome(tmp_path / "run", model=how).values())
        assert status == "failed"
        assert words in reason
    assert set(statuses(tmp_path / "run", model="good").values()) == {"ok"}


def test_a_model_of_pictures_too_small_to_score_fails_alone(three: Path, tmp_path: Path) -> None:
    models = {"bad": TINY | {"img_size": 16}, "good": TINY}
    summary = attack(three, tmp_path / "run", one_cell(models=models, grid=TWO, attacks=SPAN))
    assert summary.exit_code == 3
    assert all("31" in line for line in summary.failures)
    assert set(statuses(tmp_path / "run", model="good").values()) == {"ok"}
    assert set(statuses(tmp_path / "run", model="bad").values()) == {"failed"}


def test_an_image_too_small_for_one_model_is_scored_by_the_other(tmp_path: Path) -> None:
    folder = photographs(tmp_path / "images", 2, labelled=False)
    photograph(7, (12, 12)).save(folder / "small.png")
    models = {"good": TINY, "bad": {**TINY, "patch_size": 16}}
    run = tmp_path / "run"
    assert attack(folder, run, one_cell(models=models, grid=TWO, attacks=SPAN)).exit_code == 3
    assert statuses(run, model="good")["small.png"] == "ok"
    assert statuses(run, model="bad")["small.png"] == "unreadable"


def test_where_every_model_is_bad_each_is_named_and_nothing_is_begun(
    three: Path, tmp_path: Path
) -> None:
    models = {
        "first": {**FACTS, "checkpoint": weights(tmp_path / "a.safetensors", BAD["NaN"][0])},
        "second": {**FACTS, "checkpoint": weights(tmp_path / "b.safetensors", BAD["types"][0])},
        "third": {"checkpoint": "random", "img_size": 32},
    }
    config = one_cell(models=models, grid=[{"models": [*models], "settings": ["a"]}], attacks=SPAN)
    with pytest.raises(UserError) as caught:
        attack(three, tmp_path / "run", config)
    assert all(name in str(caught.value) for name in [*models, "norm.weight", "int8"])
    assert not (tmp_path / "run").exists()


def test_a_model_whose_code_fails_is_its_own_rows_with_the_place(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = simulated.Simulated.open

    def broken(self: Any, model: str) -> Any:
        return 1 / 0 if model == "bad" else opened(self, model)

    monkeypatch.setattr(simulated.Simulated, "open", broken)
    config = one_cell(models={"bad": TINY, "good": TINY}, grid=TWO, attacks=SPAN)
    assert attack(three, tmp_path / "run", config).exit_code == 3
    assert set(statuses(tmp_path / "run", model="good").values()) == {"ok"}
    for status, reason in outcome(tmp_path / "run", model="bad").values():
        assert status == "failed"
        assert "ZeroDivisionError" in reason
        assert "test_failures.py" in reason
    assert any("Traceback" in entry.get("traceback", "") for entry in logged(tmp_path / "run"))


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


def test_gradients_that_are_not_finite_fail_their_images_alone(
    images: Path, whole: Path, tmp_path: Path
) -> None:
    grid = [{"models": ["ViT", "MJP"], "settings": ["b"], "gammas": [0.5]}]
    config, bad = tiny(dtypes=["float64"], grid=grid), {"2.png", "4.png"}
    with pytest.MonkeyPatch.context() as patch:
        broken_for(patch, "2.png", torch.nan)
        broken_for(patch, "4.png", torch.inf)
        summary = attack(images, tmp_path / "run", config)
    assert summary.exit_code == 3
    assert len(summary.failures) == 4
    assert all(any(name in failure for name in bad) for failure in summary.failures)
    for entry in cells(tmp_path / "run"):
        told = statuses(tmp_path / "run", run_id=entry["run_id"])
        assert {name for name, status in told.items() if status == "failed"} == bad
        stored = tensors(tmp_path / "run", entry["run_id"])
        assert stored.keys() == told.keys() - bad
        for image_id, expected in tensors(whole, entry["run_id"]).items():
            if image_id in stored:
                found = stored[image_id]["images"]
                torch.testing.assert_close(found, expected["images"], atol=1e-3, rtol=0)
    assert attack(images, tmp_path / "run", config).exit_code == 0  # not finished: done again
    assert set(rows(tmp_path / "run")["status"]) == {"ok"}


def test_a_failed_retry_never_replaces_a_finished_image(
    images: Path, own: Path, tmp_path: Path
) -> None:
    """A block is attacked whole, but only the rows of what was left are written."""
    run, config = tmp_path / "run", one_cell(dtypes=["float64"], attacks=SPAN)
    good = (own / "4.png").read_bytes()
    (own / "4.png").write_bytes(b"")
    attack(own, run, config)
    (own / "4.png").write_bytes(good)
    before = values(run)
    with pytest.MonkeyPatch.context() as patch:
        for name in names(6):
            broken_for(patch, name, torch.nan)
        assert attack(images, run, config).exit_code == 3
    assert {name for name, status in statuses(run).items() if status == "ok"} == (
        set(names(6)) - {"4.png"}
    )
    assert values(run).dropna().equals(before.dropna())
    assert attack(images, run, config).exit_code == 0
    assert set(statuses(run).values()) == {"ok"}
