"""Whom the card's sentence is about, how many uploads it says, and what it says without truth."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.card.content import Card
from mjp_privacy.report.contents import read_contents
from mjp_privacy.report.write import write_report
from tests.helpers.card_run import card_of, card_of_lines
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    image_rows,
    intact,
    write_rows,
)

MASKED = {"setting": "c", "gamma": 0.27}
WITHHELD = {"withhold": "pos_embed"}
FAILED = ", and stays below the floor in the mean: the attack failed there, which is no measure of "
SAFE = "which is no evidence of safety: the attacks do not reach it, or the client's loss (dropout,"


# whom it is about ---------------------------------------------------------------------------------


def test_it_leads_with_the_undefended_client_where_none_masks(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("token_span", **WITHHELD), [9.0, 8.0], {"grey_psnr": 12.0}),
        (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0}),
    )
    assert made.rows[made.main].client == "plain (a)"
    assert made.sentence.startswith("From one upload of the plain client (batch 1, float32) the ")
    assert "floor" not in made.sentence
    assert made.beside == (
        "Defended (plain, withhold pos embed (a)): none of 2 pictures exactly and 0 at 20 dB or "
        f"more (median 8.5 dB){FAILED}protection."
    )


def test_it_leads_with_mjp_where_that_was_attacked_by_a_match(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("token_span", **WITHHELD), [9.0, 8.0], {"grey_psnr": 12.0}),
        (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0}),
        (intact("masked_span", **MASKED), [11.0, 10.0], {"zero_rows": 3.0, "grey_psnr": 12.0}),
    )
    assert "From one upload of the MJP γ .27 client" in made.sentence
    assert f"(median 10.5 dB){FAILED}protection." in made.sentence
    assert made.beside.startswith("The undefended client: none of 2 pictures exactly and all")


@pytest.mark.parametrize(
    ("psnrs", "said"),
    [
        ([math.inf, 30.0, 12.0], "does not protect these pictures: one upload gives 1 of 3 exact"),
        ([21.0, 30.0, 12.0], "does not protect these pictures: one upload gives 2 of 3 at 20 dB"),
        ([21.0, 11.0, 12.0], "does not protect all of these pictures: one upload gives 1 of 3"),
        ([19.9, 11.0, 12.0], "protects these pictures is not shown"),
    ],
)
def test_the_verdict_of_a_defended_client(tmp_path: Path, psnrs: list[float], said: str) -> None:
    attack = intact("masked_span", **MASKED)
    made = card_of_lines(tmp_path, (attack, psnrs, {"zero_rows": 3.0, "grey_psnr": 12.0}))
    assert said in made.verdict
    assert "MJP γ .27" in made.verdict
    assert len(made.verdict.split()) <= 30


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_missing_rows_are_said_where_the_figure_stands(tmp_path: Path, lost: int) -> None:
    """Of an attack that lacks some of its rows, or all: a weaker one takes its place."""
    zero = {"zero_rows": 3.0, "grey_psnr": 12.0}
    strong = intact("pixel_lattice", **MASKED, planned_images=2)
    made = card_of_lines(
        tmp_path,
        (intact("masked_span", **MASKED, planned_images=2), [22.0, 21.0], zero),
        (strong, [90.0, 80.0][: 2 - lost], zero),
    )
    row = made.rows[made.main]
    assert row.one_upload is not None
    assert ("unfinished" in [flag.name for flag in row.one_upload.flags]) == bool(lost)
    assert ("rows are missing" in made.verdict) == bool(lost)


def test_the_verdict_of_an_undefended_client(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0, math.inf], {}))
    assert made.verdict == "These pictures leak: one upload gives 1 of 2 exactly."


def test_what_was_not_run_is_a_command_that_runs_it(tmp_path: Path) -> None:
    april = cell("april", **MASKED)
    made = card_of_lines(tmp_path, (april, [7.0, 8.0], {"zero_rows": 3.0, "grey_psnr": 12.0}))
    assert made.verdict.startswith("Not shown: ")
    assert "mjp attack ladder_vit" in made.verdict
    assert len(made.verdict.split()) <= 30


def test_of_several_models_it_names_those_it_speaks_of(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("patch_gradient"), [30.0, 40.0], {"grey_psnr": 12.0}),
        (intact("masked_span", model="ViT+MJP", **MASKED), [21.0], {"grey_psnr": 12.0}),
    )
    assert "From one upload of the MJP γ .27 client of ViT+MJP (batch 1" in made.sentence
    assert made.beside.startswith(f"The undefended client ({made.rows[0].client}): none of 2")
    assert made.rows[0].client.endswith(" · DeiT-S")


def test_an_undefended_client_below_the_floor_is_not_said_to_be_protected(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path, (intact("patch_gradient"), [9.0], {"grey_psnr": 12.0}))
    assert made.sentence.endswith("(median 9.0 dB), and stays below the floor in the mean.")


# how many uploads ---------------------------------------------------------------------------------


def with_uploads(six: list[float | str], tmp_path: Path) -> Card:
    return card_of_lines(
        tmp_path,
        (intact("patch_gradient", attack="patch_gradient"), [30.0, 40.0], {}),
        (
            intact("r2", attack_name="multi_round", attack="multi_round (2)", uploads=2),
            [50.0] * 2,
            {},
        ),
        (intact("r6", attack_name="multi_round", attack="multi_round (6)", uploads=6), six, {}),
    )


@pytest.mark.parametrize(
    ("six", "uploads"), [(["unsupported"] * 2, 2), (["failed"] * 2, 2), ([60.0, "failed"], 6)]
)
def test_only_uploads_of_an_attack_with_a_result_are_said(
    tmp_path: Path, six: list[float | str], uploads: int
) -> None:
    made = with_uploads(six, tmp_path)
    assert made.beside.startswith(f"With up to {uploads} uploads of the same picture: ")
    derived = {line.role: line for line in read_contents([tmp_path]).derived if line.uploads > 1}
    assert {line.uploads for line in derived.values()} == {uploads}


def test_refused_attacks_on_several_uploads_make_no_line_of_their_own(tmp_path: Path) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("patch_gradient"), [30.0], {}),
        (intact("patch_prior"), [31.0], {}),
        (intact("r6", attack_name="multi_round", uploads=6), ["unsupported"], {}),
    )
    assert made.rows[0].any_uploads is None
    assert made.rows[0].absent[2] == "does not apply"
    assert "uploads of the same" not in made.beside
    assert {line.uploads for line in read_contents([tmp_path]).derived} == {1}


# why there is no figure ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("april", "words"),
    [("unsupported", "does not apply"), ("failed", "failed"), ("unscored", "not scored")],
)
def test_an_attack_without_a_figure_is_not_said_to_be_not_run(
    tmp_path: Path, april: str, words: str
) -> None:
    made = card_of_lines(
        tmp_path,
        (intact("april", victim="april_block"), [april], {}),
        (intact("patch_gradient"), [30.0], {}),
    )
    assert made.rows[0].published is None
    assert made.rows[0].absent[0] == words
    write_report([tmp_path], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    (cell,) = re.findall(r'data-label="APRIL as published" class="none">(.*?)</td>', page)
    assert cell == f'<span class="muted">{words}</span>'


def test_an_attack_that_was_not_run_is_said_so(tmp_path: Path) -> None:
    made = card_of_lines(tmp_path, (intact("patch_gradient"), [30.0], {}))
    assert made.rows[0].absent[0] == "not run"


def test_a_long_reason_is_cut_between_words_and_keeps_its_lines(tmp_path: Path) -> None:
    reason = "it needs a client of another kind " * 12
    entries = [intact(name) for name in ("april", "april_prior", "patch_gradient")]
    store = RunStore(tmp_path)
    store.write_cells(entries)
    for entry in entries:
        known = {} if entry is entries[2] else {"status": "unsupported", "reason": reason.strip()}
        write_rows(store, entry, image_rows(entry, image_id(0), 30.0, **known))
    last = write_report([tmp_path], tmp_path / "out").console.splitlines()[-1]
    assert last.startswith("2 rows unsupported: it needs a client of another kind it needs")
    assert last.endswith(" … (lines 1–2)")
    assert set(last.split()[3:-3]) <= set(reason.split())
    assert len(last) <= 120


# without truth ------------------------------------------------------------------------------------


def without_truth(tmp_path: Path, residuals: list[float], **facts: object) -> str:
    store = RunStore(tmp_path)
    entry = intact("masked_span", **facts)
    store.write_cells([entry])
    names = [image_id(i) for i in range(len(residuals))]
    rows = []
    for name, value in zip(names, residuals, strict=True):
        scores = image_rows(entry, name, 0.0, status="unscored", reason="no truth")
        residual = {"metric": "gradient_residual", "variant": "diagnostic", "value": value}
        rows += [*scores, scores[0] | residual | {"status": "ok", "reason": ""}]
    write_rows(store, entry, rows)
    pictures = {"images": torch.rand(len(names), 3, 8, 8)}
    add_pictures(store, "masked_span", pictures, names)
    return card_of(tmp_path).sentence


def test_a_picture_with_the_uploaded_gradient_is_almost_certainly_the_clients(
    tmp_path: Path,
) -> None:
    said = without_truth(tmp_path / "one", [1.3e-6])
    assert said.startswith(
        "1 picture was reconstructed from uploads of the plain client (batch 1, float32); the best "
        "attack's picture has the uploaded gradient to 1.3e-06: almost certainly the client's "
        "picture. The private images are not known here"
    )
    said = without_truth(tmp_path / "two", [1e-3, 3e-3])
    assert said.startswith("2 pictures were reconstructed from uploads of the plain client")
    assert (
        "; in the median the best attack's have the uploaded gradient to 0.002: almost certainly "
        "the client's pictures." in said
    )


def test_where_patches_are_masked_a_small_residual_proves_nothing(tmp_path: Path) -> None:
    said = without_truth(tmp_path, [1e-3], **MASKED)
    assert "to 0.001: where patches are masked that is no proof of a good picture." in said
    assert "almost certainly" not in said


def test_a_large_residual_is_no_evidence_of_safety(tmp_path: Path) -> None:
    said = without_truth(tmp_path / "one", [0.8])
    assert (
        "the gradient of the best attack's picture differs from the uploaded one by 0.8 of" in said
    )
    assert (
        f"its size, {SAFE} label smoothing, mixup), labels, mean and std or batch differ " in said
    )
    said = without_truth(tmp_path / "small", [0.05, 0.05])
    assert "pictures differs from the uploaded one by 0.05 of its size in the median. The" in said
    assert "safety" not in said


@pytest.mark.filterwarnings("error::FutureWarning")
def test_rows_without_any_score_are_joined_without_a_warning(tmp_path: Path) -> None:
    """Of uploads without truth, where one attack's column of values was stored without a type."""
    store = RunStore(tmp_path)
    entries = [intact(name) for name in ("patch_gradient", "april_optimization")]
    store.write_cells(entries)
    for entry, status in zip(entries, ("unscored", "unsupported"), strict=True):
        rows = image_rows(entry, image_id(0), 0.0, status=status, reason="so it is")
        rows = [row | {"value": None} for row in rows] if status == "unsupported" else rows
        if status == "unscored":
            residual = {"metric": "gradient_residual", "variant": "diagnostic", "value": 0.5}
            rows.append(rows[0] | residual | {"status": "ok", "reason": ""})
        write_rows(store, entry, rows)
    derived = read_contents([tmp_path]).derived
    assert [line.role for line in derived] == ["worst_case", "attackers_choice"]
    assert set(derived[0].scores("psnr", "standard")["status"]) == {"unscored"}
