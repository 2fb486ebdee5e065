"""What must not look like protection: failed, late, unscored and unread pictures, and what nobody
tried; and that nothing is counted twice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.april import April
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card, of_several
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.figures import exact_share, image_counts, success_share
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import card_of, card_of_lines, keys
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_rows,
    intact,
    only_line,
    photograph,
    write_rows,
)
from tests.helpers.runs import attack, names, photographs, rows, tiny

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}
ZERO = {"zero_rows": 3.0, "grey_psnr": 12.0}
LATE = {"over_budget": 1.0, "attack_seconds": 30.0}


@pytest.mark.parametrize(
    ("psnr", "diagnostics", "expected", "in_vain"),
    [
        ([25.0, 26.0], {}, "", False),
        (["failed", "failed"], {}, "cut_short", True),
        ([25.0, "failed"], {}, "cut_short", False),
        ([12.0, 13.0], LATE, "cut_short", True),
        (["unsupported", "unsupported"], {}, "", False),  # it does not apply: it was tried
    ],
)
def test_an_attack_that_failed_or_ran_out_of_time_is_marked_and_not_said_to_be_tried(
    tmp_path: Path,
    psnr: list[float | str],
    diagnostics: dict[str, float],
    expected: str,
    in_vain: bool,
) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("masked_span", **MASKED), [21.0, 22.0], ZERO),
        (intact("token_span", **MASKED), psnr, diagnostics),
    )
    assert keys(made.rows[0].one_upload) == expected
    untried, *others = made.not_tried
    assert "token_span" not in untried
    assert any("token_span" in item for item in others) == in_vain


@pytest.mark.parametrize("facts", [{"setting": "b"}, {"dtype": "float64"}])
def test_an_attack_in_another_setting_or_precision_was_not_tried_here(
    tmp_path: Path, facts: dict[str, str]
) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("masked_span", **MASKED), [21.0], ZERO),
        (intact("token_span", **MASKED | facts), [20.0], ZERO),
    )
    assert "token_span" in made.not_tried[0]
    assert "masked_span" not in made.not_tried[0]


def test_exact_pictures_count_whatever_the_attack_knows(tmp_path: Path) -> None:
    """Of an attack that does not know the masks: its exact pictures leaked all the same."""
    made = card_of_lines(tmp_path, (intact("patch_gradient", **MASKED), [math.inf, 9.0], ZERO))
    (row,) = made.rows
    assert row.one_upload is not None
    assert (row.one_upload.exact, row.one_upload.of) == (1, 2)
    assert keys(row) == "no_adaptive_attack"
    assert "1 of 2 exactly" in made.verdict
    beside = intact("april_unk_aware", **MASKED)
    both = (intact("patch_gradient", **MASKED), [math.inf, 9.0], ZERO), (beside, [8.0, 8.0], ZERO)
    (row,) = card_of_lines(tmp_path / "two", *both).rows
    assert row.one_upload is not None
    assert row.one_upload.exact == 1


def test_rows_marked_ok_without_any_score_count_as_not_recovered(tmp_path: Path) -> None:
    """Neither a line of such rows nor such rows of a line vanish."""
    for name, psnr in (("some", [30.0, math.nan]), ("all", [math.nan, math.nan])):
        store, entry = RunStore(tmp_path / name), intact("patch_gradient")
        store.write_cells([entry])
        of_images = (image_rows(entry, image_id(i), value) for i, value in enumerate(psnr))
        write_rows(store, entry, [row | {"code": "a"} for rows in of_images for row in rows])
        line = only_line(tmp_path / name)
        lost = sum(map(math.isnan, psnr))
        for variant in ("standard", "paper"):
            counts = image_counts(line, variant)
            assert (counts.ok, counts.failed, counts.total) == (2 - lost, lost, 2)
        assert (success_share(line, 20).count, success_share(line, 20).of) == (2 - lost, 2)
        assert exact_share(line).of == 2
        assert line.rows.query("metric == 'psnr' and variant == 'standard'")["status"].tolist() == [
            *["ok"] * (2 - lost),
            *["failed"] * lost,
        ]
        assert any("failed" in item for item in read_contents([tmp_path / name]).reasons)


def certain_pictures(folder: Path, batch: int) -> int:
    """How many of two uploads' pictures are said to be certain, of which two attacks mark one each
    and one of them is the other's."""
    store = RunStore(folder)
    entries = [intact(name, batch=batch) for name in ("batch_span", "span_matching")]
    store.write_cells(entries)
    for at, entry in enumerate(entries):
        rows = []
        for i in range(2):
            scores = image_rows(entry, image_id(i), 0.0, status="unscored", reason="no truth")
            marks = {"certain": float(i == at), "gradient_residual": 0.1}
            diagnostics = [
                scores[0] | {"metric": n, "variant": "diagnostic", "value": v, "status": "ok"}
                for n, v in marks.items()
            ]
            rows += [*scores, *diagnostics]
        write_rows(store, entry, rows)
        pictures = {"images": torch.rand(2, 3, 8, 8)}
        add_pictures(store, entry["run_id"], pictures, [image_id(0), image_id(1)])
    words = card_of(folder).beside.split()
    return int(words[words.index("certain:") - 1])


def test_certain_pictures_of_a_batch_are_not_added_up_over_attacks(tmp_path: Path) -> None:
    """They come in no known order, so that two attacks may mean the same one."""
    assert certain_pictures(tmp_path / "single", 1) == 2
    assert certain_pictures(tmp_path / "batch", 2) == 1


def test_pictures_of_two_runs_with_equal_names_are_not_mixed(tmp_path: Path) -> None:
    for at, name in enumerate(("one", "two")):
        store, entry = RunStore(tmp_path / name), cell("april", setting="c", gamma=0.27)
        store.write_cells([entry])
        simple_line(store, entry, [20.0])
        plain = photograph(at)[None]
        tensors = {"images": plain * 0.5, "target": plain, "plain": plain}
        add_pictures(store, "april", tensors, [image_id(0)])
    gallery = read_contents([tmp_path / "one", tmp_path / "two"]).gallery
    (shown,) = gallery.shown
    assert set(shown.originals) == {1, 2}
    assert len({gallery.pictures[key] for key in shown.originals.values()}) == 2


def test_an_experiment_that_is_part_of_another_is_no_second_one(tmp_path: Path) -> None:
    card = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0], {}))
    folder = tmp_path / "experiments"
    folder.mkdir()
    model = "models: {A: {model: vit_small}}\ngrid: [{models: [A], settings: [a], attacks: ["
    for name, attacks in (("small", "april"), ("large", "april, grey"), ("other", "other_image")):
        listed = ", ".join(f"{{name: {attack}}}" for attack in attacks.split(", "))
        text = (
            f"name: {name}\nseed: 0\ndtypes: [float32]\nattacks: [{listed}]\n{model}{attacks}]}}]"
        )
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        said = of_several(card, [tmp_path]).verdict
        assert (said != card.verdict) == (name == "other")
    assert "small" not in said
    assert card == build_card(clients_of(load_runs([tmp_path]).lines))


# files that are no images -------------------------------------------------------------------------

ATTACKS = [{"name": "patch_gradient"}, {"name": "patch_prior"}, {"name": "grey"}]


def config(**changes: Any) -> dict[str, Any]:
    models = {"ViT": tiny()["models"]["ViT"]}
    grid = [{"models": ["ViT"], "settings": ["a"]}]
    return tiny(attacks=ATTACKS, models=models, grid=grid, **changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six photographs and a file that is no image."""
    images = photographs(tmp_path / "images")
    (images / "labels.csv").unlink()
    (images / "broken.jpg").write_bytes(b"no image")
    return images


def test_a_file_that_is_no_image_is_in_no_figure(folder: Path, tmp_path: Path) -> None:
    summary = attack(folder, tmp_path / "run", config())
    assert (summary.exit_code, len(summary.failures)) == (3, 1)
    contents = read_contents([tmp_path / "run"])
    for line in contents.lines:
        share = success_share(line, 20)
        assert share.of == 6
        assert set(line.rows["image_id"]) == set(names(6))
    for figure in (contents.card.rows[0].one_upload, contents.card.rows[0].floor):
        assert figure is not None
        assert (figure.of, figure.n) == (6, 6)
    assert "6 of 6 exactly" in contents.card.verdict
    assert "partly_inapplicable" not in {flag.key for flag in contents.card.flags}
    assert dict(contents.card.facts)["The pictures"].startswith("6 pictures at")
    assert set(contents.standard.frame["n_failed"]) == {0}
    assert set(contents.standard.frame["n_not_run"]) == {0}


def test_it_is_said_once_with_its_name(folder: Path, tmp_path: Path) -> None:
    attack(folder, tmp_path / "run", config())
    summary = write_report([tmp_path / "run"], tmp_path / "report")
    sentence = (
        "1 file is no readable image: broken.jpg (not an image in a format that Pillow can read); "
        "in no figure"
    )
    assert summary.console.count("broken.jpg") == 1
    assert sentence in summary.console
    assert "failed" not in summary.console
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("broken.jpg") == 1
    assert "6 of 7" not in page
    assert (summary.failed_images, summary.not_run) == (3, 0)  # once a line: nothing is hidden
    samples = (tmp_path / "report" / "samples.csv").read_text()
    assert "broken.jpg" in samples


def test_what_shares_a_step_with_it_is_in_no_figure_either(folder: Path, tmp_path: Path) -> None:
    (folder / "0.png").unlink()
    attack(folder, tmp_path / "run", config(client={"batch": 2}, block=6))
    contents = read_contents([tmp_path / "run"])
    assert {len(set(line.rows["image_id"])) for line in contents.lines} == {4}
    first, second = contents.reasons[:2]
    assert first.startswith("1 file is no readable image: broken.jpg (not an image")
    mate = set(names(6)) - {"0.png", *contents.lines[0].rows["image_id"]}
    assert second == f"1 image is in a client step with such a file: {mate.pop()}; in no figure"


def test_a_failure_of_an_attack_stays_a_picture_that_was_not_recovered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: April, *_: Any, **__: Any) -> None:
        raise UserError("no solution")

    monkeypatch.setattr(April, "run", broken)
    attack(folder, tmp_path / "run", config() | {"attacks": [{"name": "april"}, *ATTACKS]})
    april = read_contents([tmp_path / "run"]).lines[0]
    assert success_share(april, 20).text().startswith("0 of 6")


@pytest.mark.nightly
def test_a_limit_is_filled_from_files_that_are_images(folder: Path, tmp_path: Path) -> None:
    attack(folder, tmp_path / "six", config(), limit=6)
    assert len(attack(folder, tmp_path / "all", config()).failures) == 1
    order = list(rows(tmp_path / "six")["image_id"].unique())
    assert sorted(order) == names(6)
    for limit in (1, 3, 6):
        summary = attack(folder, tmp_path / f"run{limit}", config(), limit=limit)
        read = rows(tmp_path / f"run{limit}")
        assert read["image_id"].nunique() == limit
        assert set(read["status"]) <= {"ok", "unscored"}
        passed = [f for f in summary.failures if f.startswith("broken.jpg: not an image")]
        assert summary.exit_code == (3 if passed else 0)
        assert all(failure.endswith("another file replaced it") for failure in passed)
        assert "broken.jpg" not in set(read["image_id"])
    (folder / "broken.jpg").unlink()
    attack(folder, tmp_path / "without", config(), limit=3)
    assert set(rows(tmp_path / "without")["image_id"]) == set(rows(tmp_path / "run3")["image_id"])


def test_a_limit_on_files_none_of_which_is_an_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(b"")
    with pytest.raises(UserError) as caught:
        attack(tmp_path / "images", tmp_path / "run", config(), limit=1)
    assert "None of the 2 files of" in str(caught.value)
    assert "is a readable image: " in str(caught.value)
    assert "the file is empty (0 bytes). Give a folder or zip of photographs." in str(caught.value)
