"""Lines without private images: what is stored of them, what an attacker would take, the table."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mjp_privacy.experiment.config import load_experiment
from mjp_privacy.experiment.run import attack_uploads
from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import clients_of, derived_lines
from mjp_privacy.report.lines import Line
from mjp_privacy.report.runs import load_runs
from mjp_privacy.report.tables.comparisons import residual_table, without_truth
from mjp_privacy.report.worst_case import (
    attackers_choice_by_image,
    has_truth,
    picture_ids,
)
from tests.helpers.federations import MJP, run
from tests.helpers.report_rows import add_pictures, cell, image_rows, row, write_rows
from tests.helpers.uploads import load_uploads

ATTACKS: dict[str, Any] = {
    "name": "attacks",
    "attacks": [
        {"name": "grey"},
        {"name": "patch_gradient"},
        {"name": "mask_locator"},
        {"name": "masked_span", "options": {"prior": "stationary"}},
    ],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MJP clients' uploads: `uploads` with the truth, `blind` without."""
    root = tmp_path_factory.mktemp("recorded")
    uploads = run(root, model=MJP, gamma=0.5) / "uploads"
    shutil.copytree(uploads, root / "blind", ignore=shutil.ignore_patterns("truth"))
    for folder, out in ((uploads, "seen_run"), (root / "blind", "blind_run")):
        attack_uploads(load_experiment(ATTACKS), folder, root / out, device="cpu")
    return root


def by_title(folder: Path) -> dict[str, Line]:
    return {line.attack: line for line in load_runs([folder]).lines}


# recorded uploads ---------------------------------------------------------------------------------


def test_pictures_and_residuals_of_uploads_without_truth_are_stored(recorded: Path) -> None:
    """They are those of the same uploads with the truth, which only adds scores."""
    blind, seen = by_title(recorded / "blind_run"), by_title(recorded / "seen_run")
    for name in ("patch_gradient", "masked_span"):
        assert not has_truth(blind[name])
        assert has_truth(seen[name])
        uploads = picture_ids(blind[name])
        assert uploads == ["b1s1_r00001_000_at00001/0", "b1s1_r00001_001_at00001/0"]
        truth = {u.name: u.truth() for u in load_uploads(recorded / "out" / "uploads")}
        for upload in uploads:
            known = truth[upload.removesuffix("/0")]
            assert known is not None
            one, other = (
                blind[name].reconstruction(upload),
                seen[name].reconstruction(known.image_ids[0]),
            )
            assert one is not None
            assert other is not None
            assert {"images"} <= set(one) <= {"images", "named_mask"}
            assert torch.allclose(one["images"], other["images"], atol=1e-5)
            residuals = [
                line.scored("gradient_residual", "diagnostic")[image]
                for line, image in ((blind[name], upload), (seen[name], known.image_ids[0]))
            ]
            assert residuals[0] == pytest.approx(residuals[1], rel=1e-3)


def test_the_residual_is_that_of_the_stored_picture(recorded: Path) -> None:
    """Computed again with plain autograd, from the files alone."""
    line = by_title(recorded / "blind_run")["masked_span"]
    for upload in load_uploads(recorded / "blind"):
        image = f"{upload.name}/0"
        if image not in picture_ids(line):
            continue
        stored = line.reconstruction(image)
        assert stored is not None
        model = upload.model()
        sent = upload.tensors()
        mask = sent["pos_embed"][0, 1:].abs().amax(-1)[None] == 0
        logits = model(model.normalize(stored["images"][None]), mask=mask)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(upload.header.labels))
        weight = model.get_parameter("patch_embed.proj.weight")
        (gradient,) = torch.autograd.grad(loss, weight)
        given = sent["patch_embed.proj.weight"]
        expected = float((gradient - given).norm() / given.norm())
        residual = line.scored("gradient_residual", "diagnostic")[image]
        assert residual == pytest.approx(expected, rel=1e-3)


def test_derived_lines_hold_the_pictures_of_what_was_chosen(recorded: Path) -> None:
    lines = load_runs([recorded / "blind_run"]).lines
    derived = {line.role: line for line in derived_lines(clients_of(lines))}
    choice = derived["attackers_choice"]
    assert not has_truth(choice)
    assert picture_ids(choice) == sorted(choice.chosen.index)
    assert len(picture_ids(choice)) == 2
    assert all(choice.reconstruction(image) is not None for image in picture_ids(choice))
    assert picture_ids(derived["worst_case"]) == []


# choices with planted residuals -------------------------------------------------------------------

Residuals = Mapping[str, float | None]
"""By image; None: a picture without a residual."""


def planted(folder: Path, attacks: Mapping[str, Residuals], **changes: Any) -> list[Line]:
    """A run without truth; the attacks by their names, `name x` for a second one of a name."""
    store = RunStore(folder)
    cells = []
    for title, residuals in attacks.items():
        facts = {"attack": title, "attack_name": title.split()[0], "victim": "intact"}
        entry = cell(title, **(facts | changes.get(title.split()[0], {})))
        cells.append(entry)
        rows = []
        for image, value in residuals.items():
            rows += image_rows(entry, image, 0.0, status="unscored", reason="no images")
            if value is not None:
                residual = row(entry, image, "gradient_residual", "diagnostic")
                rows.append(residual | {"value": value})
        write_rows(store, entry, rows)
        if residuals:
            images = torch.rand(len(residuals), 3, 8, 8)
            add_pictures(store, title, {"images": images}, list(residuals))
    store.write_cells(cells)
    return list(load_runs([folder]).lines)


def chosen(lines: list[Line]) -> dict[str, str]:
    return {image: line.attack for image, line in attackers_choice_by_image(lines).items()}


def test_the_smallest_residual_is_chosen_and_of_equal_ones_the_first(tmp_path: Path) -> None:
    lines = planted(
        tmp_path,
        {
            "patch_gradient": {"a": 0.5, "b": 0.1, "c": 0.2},
            "masked_span": {"a": 0.4, "b": 0.2, "c": 0.2},
        },
    )
    assert chosen(lines) == {"a": "masked_span", "b": "patch_gradient", "c": "patch_gradient"}


def test_attacks_on_an_altered_client_are_chosen_where_no_other_made_a_picture(
    tmp_path: Path,
) -> None:
    lines = planted(
        tmp_path,
        {
            "april": {"a": 0.01, "only april": 0.1},
            "masked_span": {"a": 0.5},
        },
        april={"victim": "april_block"},
    )
    assert chosen(lines) == {"a": "masked_span", "only april": "april"}


def test_figures_of_the_table(tmp_path: Path) -> None:
    values = {f"{i}": 0.1 * i**2 for i in range(7)}
    attacks: dict[str, Residuals] = {
        "patch_gradient": values,
        "masked_span": {"0": 9.0, "1": 0.0},
        "token_span": {"0": None},
        "april": {},
    }
    (group,) = clients_of(planted(tmp_path, attacks))
    assert without_truth([group]) == [group]
    table = residual_table([group])
    assert table is not None
    low, median, high = np.percentile(list(values.values()), (25, 50, 75))
    assert table.rows == (
        ("plain", "patch_gradient", "7", f"{median:.4f} [{low:.4f}, {high:.4f}]", "6"),
        ("plain", "masked_span", "2", "4.5000 [2.2500, 6.7500]", "1"),
        ("plain", "token_span", "1", "unknown: no labels or no gradient", "0"),
    )


def test_a_line_that_says_nothing_is_not_taken_for_one_without_truth(tmp_path: Path) -> None:
    """Refused and failed attacks, and one that makes no picture."""
    store = RunStore(tmp_path)
    cells = [cell("refused"), cell("unscored", attack="mask_locator"), cell("empty")]
    store.write_cells(cells)
    for entry, status in zip(cells, ("unsupported", "unscored"), strict=False):
        write_rows(store, entry, image_rows(entry, "a", math.nan, status=status, reason="-"))
    for line in load_runs([tmp_path]).lines:
        assert has_truth(line)
        assert picture_ids(line) == []
    assert residual_table(clients_of(load_runs([tmp_path]).lines)) is None
