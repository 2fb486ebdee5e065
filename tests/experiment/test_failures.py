"""What breaks is a row with its reason: images, models, numbers, attacks, memory, time. The rest
goes on, and what is mended completes the same run."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from attacks import ATTACKS, step
from attacks.budget import over_budget
from mjp_privacy import load_model
from mjp_privacy.client.defenses.published import GaussianNoise
from mjp_privacy.client.gradients import FedSGDClient
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.experiment import cell as cell_module
from mjp_privacy.experiment import simulated
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.interfaces import ClientInput
from tests.helpers.own_attacks import ANSWERS, WHERE, raised
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
    rows,
    said,
    same_results,
    tensors,
    tiny,
    written,
)

SPAN, GREY = [{"name": "patch_gradient"}], [{"name": "grey"}]


@pytest.fixture
def own(images: Path, tmp_path: Path) -> Path:
    """A copy of the photographs to spoil."""
    return Path(shutil.copytree(images, tmp_path / "images"))


def statuses(out: Path, **wanted: Any) -> dict[str, str]:
    return {name: status for name, (status, _) in outcome(out, **wanted).items()}


# images -------------------------------------------------------------------------------------------


def test_images_that_cannot_be_used_are_rows_with_a_reason(own: Path, tmp_path: Path) -> None:
    good = {name: (own / name).read_bytes() for name in names(6)[1:5]}
    (own / "1.png").write_bytes(b"no image")
    (own / "2.png").write_bytes(b"")
    Image.new("RGB", (100, 7)).save(own / "3.png")
    (own / "4.png").write_bytes(good["4.png"][:200])
    run = tmp_path / "run"
    summary = attack(own, run, one_cell())
    assert summary.exit_code == 3
    told = outcome(run)
    assert {name for name, (status, _) in told.items() if status == "unreadable"} == {*good}
    assert {status for name, (status, _) in told.items() if name not in good} == {"ok"}
    assert "7 px" in told["3.png"][1]
    assert all(any(name in line for line in summary.failures) for name in good)
    assert rows(run)[lambda r: r["status"] == "unreadable"]["value"].isna().all()
    assert {*tensors(run, cells(run)[0]["run_id"])} == {"0.png", "5.png"}

    for name, content in good.items():
        (own / name).write_bytes(content)
    assert attack(own, run, one_cell()).exit_code == 0
    attack(own, tmp_path / "fresh", one_cell())
    same_results(run, tmp_path / "fresh")


def test_with_a_limit_another_file_takes_the_place_of_one_that_cannot_be_used(
    own: Path, tmp_path: Path
) -> None:
    """Each is named, and the images are as many as asked for; of six files four can be used."""
    (own / "0.png").write_bytes(b"no image")
    Image.new("RGB", (7, 7)).save(own / "3.png")  # smaller than a patch
    for limit in (3, 4, 5):
        summary = attack(own, tmp_path / "run", one_cell(attacks=SPAN), limit=limit)
        assert summary.images == min(limit, 4)
        assert [*statuses(tmp_path / "run").values()] == ["ok"] * min(limit, 4)
        assert any("replaced" in line for line in summary.failures) == (limit <= 4)
    assert all(any(name in line for line in summary.failures) for name in ("0.png", "3.png"))
    assert summary.exit_code == 3


# models -------------------------------------------------------------------------------------------


def test_a_model_without_a_checkpoint_fails_alone_and_is_made_good(
    three: Path, tmp_path: Path
) -> None:
    run, path = tmp_path / "run", tmp_path / "mjp.safetensors"
    config = tiny(models={"ViT": TINY, "MJP": {**MJP, "checkpoint": None}}, attacks=SPAN)
    summary = attack(three, run, config)
    assert summary.exit_code == 3
    [line] = summary.failures
    assert line.startswith("MJP: ")
    status = [(e["model"], e["status"]) for e in cells(run)]
    assert status == [("ViT", "ok")] * 2 + [("MJP", "failed")] * 3
    done = written(run)
    save_file(load_model(**{**MJP, "seed": 5}).state_dict(), path)
    assert attack(three, run, config, weights=(f"MJP={path}",)).exit_code == 0
    of_vit = {entry["run_id"] for entry in cells(run) if entry["model"] == "ViT"}
    kept = {name: at for name, at in done.items() if name.split("/")[1] in of_vit}
    assert kept.items() <= written(run).items()
    assert [e["status"] for e in cells(run)] == ["ok"] * 5
    assert cell(run, model="MJP", setting="c")["checkpoint"] == "mjp.safetensors"

    files = written(run)  # the path of a checkpoint is no part of a run_id
    attack(three, run, config, weights={"MJP": path.rename(tmp_path / "moved.safetensors")})
    assert written(run) == files


FACTS = {"num_heads": 3, "mean": 0.5, "std": 0.5, "img_size": 32}


def spoiled(path: Path, **tensors: torch.Tensor) -> dict[str, Any]:
    """A checkpoint of ViT with other tensors (`norm_weight` is norm.weight), as a config has it."""
    state = {n: p.detach().clone() for n, p in load_model(**TINY).named_parameters()}
    changed = {name.replace("_", ".", 1): tensor for name, tensor in tensors.items()}
    save_file(state | changed, path)
    return {**FACTS, "checkpoint": str(path)}


NAN, INT8 = {"norm_weight": torch.full((192,), torch.nan)}, {"norm_bias": torch.zeros(192).char()}


def test_bad_models_are_rows_and_the_others_go_on(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are no models, sound ones that cannot take the images or their labels, and one
    whose code fails."""
    opened = simulated.Simulated.open

    def broken(self: Any, model: str) -> Any:
        return 1 / 0 if model == "broken" else opened(self, model)

    monkeypatch.setattr(simulated.Simulated, "open", broken)
    os.mkfifo(pipe := tmp_path / "pipe")
    given: dict[str, tuple[dict[str, Any], str]] = {
        "NaN": (spoiled(tmp_path / "a.safetensors", **NAN), "norm.weight"),
        "types": (spoiled(tmp_path / "b.safetensors", **INT8), "int8"),
        "nothing": ({**FACTS, "checkpoint": "nothing.safetensors"}, "nothing.safetensors"),
        "a pipe": ({**FACTS, "checkpoint": str(pipe)}, "pipe"),
        "labels": (TINY | {"num_classes": 2}, "2.png"),
        "resize": (TINY | {"resize": 8}, "resize"),
        "broken": (TINY, "(experiment/test_failures.py:"),
        "good": (TINY, ""),
    }
    named = {how: model for how, (model, _) in given.items()}
    grid = [{"models": [*given], "settings": ["a"]}]
    summary = attack(three, tmp_path / "run", one_cell(models=named, grid=grid, attacks=GREY))
    assert summary.exit_code == 3
    for how, (_, words) in given.items():
        ((status, reason),) = {*outcome(tmp_path / "run", model=how).values()}
        assert status == ("failed" if words else "ok")
        assert words in reason
        assert not words or [line for line in summary.failures if how in line and words in line]
    assert any("ZeroDivision" in entry.get("traceback", "") for entry in logged(tmp_path / "run"))


def test_where_every_model_is_bad_each_is_named_and_nothing_is_begun(
    three: Path, tmp_path: Path
) -> None:
    given = {
        "first": spoiled(tmp_path / "a.safetensors", **NAN),
        "second": spoiled(tmp_path / "b.safetensors", **INT8),
        "third": {"checkpoint": "random", "img_size": 32},
        "fourth": TINY | {"num_classes": 2},
    }
    config = one_cell(models=given, grid=[{"models": [*given], "settings": ["a"]}], attacks=SPAN)
    with pytest.raises(UserError) as caught:
        attack(three, tmp_path / "run", config)
    assert all(name in str(caught.value) for name in [*given, "norm.weight", "int8", "2.png"])
    unknown = {"ViT": {"model": "deit_smal"}}
    with pytest.raises(UserError, match=r"models\.ViT.*deit_smal.*deit_small"):
        attack(three, tmp_path / "run", one_cell(models=unknown))
    assert not (tmp_path / "run").exists()


# numbers that break down --------------------------------------------------------------------------


def broken_for(monkeypatch: pytest.MonkeyPatch, image_id: str, bad: float) -> None:
    """The client's gradient of one image is not finite."""
    gradients = FedSGDClient.gradients

    def spoiled(self: FedSGDClient, inputs: ClientInput, **arguments: Any) -> dict[str, Tensor]:
        made = gradients(self, inputs, **arguments)
        if image_id in inputs.image_ids:
            at = list(inputs.image_ids).index(image_id)
            for grad in made.values():
                grad[at] = bad
        return made

    monkeypatch.setattr(FedSGDClient, "gradients", spoiled)


def test_gradients_that_are_not_finite_fail_their_images_alone_and_no_retry_replaces_another(
    images: Path, whole: Path, tmp_path: Path
) -> None:
    """A block is attacked whole, but only the rows of what was left are written."""
    grid = [{"models": ["ViT", "MJP"], "settings": ["b"], "gammas": [0.5]}]
    config, bad = tiny(dtypes=["float64"], grid=grid), {"2.png", "4.png"}
    with pytest.MonkeyPatch.context() as patch:
        broken_for(patch, "2.png", torch.nan)
        broken_for(patch, "4.png", torch.inf)
        assert attack(images, tmp_path, config).exit_code == 3
    for entry in cells(tmp_path):
        told = statuses(tmp_path, run_id=entry["run_id"])
        assert {name for name, status in told.items() if status == "failed"} == bad
        stored = tensors(tmp_path, entry["run_id"])
        assert stored.keys() == told.keys() - bad
        for image_id, expected in tensors(whole, entry["run_id"]).items():
            if image_id in stored:
                found = stored[image_id]["images"]
                torch.testing.assert_close(found, expected["images"], atol=1e-3, rtol=0)
    done = rows(tmp_path)[lambda r: r["status"] == "ok"]
    with pytest.MonkeyPatch.context() as patch:
        for name in names(6):
            broken_for(patch, name, torch.nan)
        assert attack(images, tmp_path, config).exit_code == 3
    again = rows(tmp_path)[lambda r: r["status"] == "ok"]
    pd.testing.assert_frame_equal(again, done, check_exact=True)
    assert attack(images, tmp_path, config).exit_code == 0  # not finished: done again
    assert {*rows(tmp_path)["status"]} == {"ok"}


# attacks and defences of anybody's ----------------------------------------------------------------

FILE = "helpers/own_attacks.py"
NAMED = {
    "runtime": f"RuntimeError: sizes do not match ({FILE}:",
    "assertion": f"AssertionError ({FILE}:",
    "exit": f"SystemExit: 5 ({FILE}:",
    "user": "prior 'x': expected a file",
    "singular": "linear algebra",
    **{"nothing": "NoneType", "tensor": "Tensor", "shape": "images", "whole": "uint8"},
    **{"complex": "complex64", "nan": "not finite", "mask": "mask"},
    **{"permutation": "permutation", "diagnostics": "rank", "names": "3", "inapplicable": "99"},
}
"""What the reason of each wrong answer names."""
BEFORE_IT_RUNS = ("needs", "unsupported")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    mine = {"faulty": Entry(f"{WHERE}:Faulty"), "slow": Entry(f"{WHERE}:Slow")}
    with patch.dict(ATTACKS, mine):
        yield


def test_a_faulty_attack_or_defence_is_rows_with_the_reason(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image that the attack bears where it is alone, 2.png, has its picture."""
    monkeypatch.setattr(GaussianNoise, "apply", lambda *_: 1 / 0)
    wrong = [{"name": "faulty", "label": a, "options": {"answer": a}} for a in ANSWERS]
    before = [{"name": "faulty", "label": m, "options": {"member": m}} for m in BEFORE_IT_RUNS]
    entry = {"models": ["ViT"], "settings": ["a"]}
    noisy = {"client": {"defenses": [{"gaussian_noise": 0.1}]}, "attacks": ["patch_gradient"]}
    config = one_cell(attacks=[*wrong, *before, *SPAN], grid=[entry, entry | noisy])
    assert attack(three, tmp_path, config).exit_code == 3
    traced = [line["message"] for line in logged(tmp_path) if line.get("traceback")]
    for answer in ANSWERS:
        told = outcome(tmp_path, attack=answer)
        failed = {name: reason for name, (status, reason) in told.items() if status == "failed"}
        assert {*failed} == {*names(3)} - ({"2.png"} if answer != "nan" else set())
        assert all(NAMED[answer] in reason for reason in failed.values()), failed
        own = any(NAMED[answer] in message for message in traced)
        assert own == (answer not in ("user", "singular", "nan"))
    for member in BEFORE_IT_RUNS:
        assert {status for status, _ in outcome(tmp_path, attack=member).values()} == {"failed"}
        assert all(f"({FILE}:" in reason for _, reason in outcome(tmp_path, attack=member).values())
    for defenses, status in (("", "ok"), ("gaussian_noise 0.1", "failed")):
        told = statuses(tmp_path, attack="patch_gradient", defenses=defenses)
        assert {*told.values()} == {status}


def test_a_stop_is_no_fault_of_the_attack(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_cell(attacks=[{"name": "faulty"}])
    with monkeypatch.context() as patch:
        patch.setitem(ANSWERS, "runtime", lambda view: raised(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            attack(three, tmp_path, config)
    # nor is whatever an attack raises after a signal: libraries turn it into errors of their own
    monkeypatch.setattr(step, "interrupted", lambda: True)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        attack(three, tmp_path, config)


# memory -------------------------------------------------------------------------------------------


def in_batches(**changes: Any) -> dict[str, Any]:
    attacks = [*SPAN, {"name": "masked_span"}, *GREY]
    grid = [{"models": ["MJP"], "settings": ["a", "c"], "gammas": [0.5]}]
    content = {"dtypes": ["float64"], "block": 6, "attacks": attacks, "models": {"MJP": MJP}}
    return tiny(**(content | changes), grid=grid)


def cramped(patch: pytest.MonkeyPatch, most: int, error: Exception | None = None) -> list[int]:
    """Let memory run out with more images than this; the numbers that were tried."""
    observe, tried = simulated.SimulatedUploads.observe, []

    def limited(self: Any, cell: Any, names: Any, records: Any) -> Any:
        tried.append(len(records))
        if len(records) > most:
            raise error or MemoryError()
        return observe(self, cell, names, records)

    patch.setattr(simulated.SimulatedUploads, "observe", limited)
    return tried


def test_the_rows_of_a_split_block_are_those_of_the_whole(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack(images, tmp_path / "whole", in_batches())
    tried = cramped(monkeypatch, 2, torch.OutOfMemoryError("CUDA out of memory"))
    assert attack(images, tmp_path / "split", in_batches()).exit_code == 0
    assert Counter(tried) == {6: 6, 3: 6, 1: 36}, "each of 6 cells learns what memory holds"
    expected, done = rows(tmp_path / "whole"), rows(tmp_path / "split")
    is_split = done["metric"] == cell_module.TOGETHER
    split, done = done[is_split], done[~is_split].reset_index(drop=True)
    assert {*split["value"]} == {1.0}
    assert split.groupby("run_id")["image_id"].nunique().eq(6).all()
    columns = [name for name in expected if name != "value"]
    pd.testing.assert_frame_equal(done[columns], expected[columns])
    at_most = done["metric"].map({"psnr": 100.0}).fillna(float("inf"))  # beyond it is rounding
    difference = (done["value"].clip(upper=at_most) - expected["value"].clip(upper=at_most)).abs()
    assert difference.max() < 1e-6
    assert cell_module.TOGETHER in said(tmp_path / "split")
    for run_id in {*expected["run_id"]}:
        left, right = (tensors(tmp_path / out, run_id) for out in ("whole", "split"))
        assert left.keys() == right.keys()
        for name, stored in left.items():
            assert (stored["images"] - right[name]["images"]).abs().max() < 1e-5


def test_what_memory_holds_is_known_before(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "free_bytes", lambda device: 20_000_000)
    tried = cramped(monkeypatch, 100)
    attacks = [*SPAN, {"name": "masked_span"}, *GREY]
    attack(images, tmp_path / "known", one_cell(attacks=attacks, dtypes=["float64"], block=6))
    assert 6 in tried, "controls need no uploads"
    assert min(tried) == 1
    assert cell_module.TOGETHER in said(tmp_path / "known")


def test_where_memory_never_suffices_the_images_fail_and_a_moving_model_is_not_split(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = cramped(monkeypatch, 0)
    for client, together in (({}, 1), ({"server_lr": 0.1}, 6)):
        tried.clear()
        out = tmp_path / f"{together}"
        assert attack(images, out, in_batches(client=client, attacks=SPAN)).exit_code == 3
        assert min(tried) == together
        assert {*rows(out)["status"]} == {"failed"}
        for reason in rows(out)["reason"]:
            assert all(n in reason for n in ("out of memory", f"{together} image", "client.batch"))


# time ---------------------------------------------------------------------------------------------


REASON = over_budget(0.3)


def with_slow(budget: Any = 0.3, **options: Any) -> dict[str, Any]:
    return one_cell(attacks=[{"name": "slow", "options": options, "seconds": budget}])


def test_an_attack_that_looks_gives_its_best_so_far_and_its_neighbours_are_not_concerned(
    three: Path, tmp_path: Path
) -> None:
    assert attack(three, tmp_path / "looks", with_slow(looks=True)).exit_code == 0
    expected = {"0.png": ("ok", ""), "1.png": ("ok", REASON), "2.png": ("ok", "")}
    assert outcome(tmp_path / "looks") == expected
    found = rows(tmp_path / "looks").set_index("metric")
    assert found.loc["over_budget", "value"].tolist() == [0, 1, 0]
    assert {*found.loc["attack_seconds", "value"]} == {0.3}
    summary = attack(three, tmp_path / "blind", with_slow())
    assert summary.exit_code == 0
    assert any(REASON in line for line in summary.inapplicable)
    assert outcome(tmp_path / "blind") == expected | {"1.png": ("unsupported", REASON)}


def test_a_resume_keeps_them_and_more_time_makes_them_again(three: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", with_slow(0.1, seconds=0.3)
    attack(three, run, config)
    assert outcome(run)["1.png"] == ("unsupported", over_budget(0.1))
    RunStore(run).compact(cells(run)[0]["run_id"], fewest_files=1)
    before = written(run)
    attack(three, run, config, attack_seconds=0.05)  # less than the config's own
    assert written(run) == before
    attack(three, run, config, attack_seconds=60.0)
    attack(three, tmp_path / "fresh", config, attack_seconds=60.0)
    same_results(run, tmp_path / "fresh")
    assert {*outcome(run).values()} == {("ok", "")}
    assert [e["run_id"] for e in cells(run)] == [e["run_id"] for e in cells(tmp_path / "fresh")]
