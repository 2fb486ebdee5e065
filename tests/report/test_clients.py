"""What a report calls a client, whether it is defended, and which attacks match it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import Client, attacked_ones, client_titles, clients_of
from mjp_privacy.report.runs import load_runs
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import add_pictures, cell, image_id, intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def clients(folder: Path, *cells: dict[str, Any], **diagnostics: float) -> list[Client]:
    store = RunStore(folder)
    store.write_cells(list(cells))
    for entry in cells:
        psnr: list[float | str] = ["failed" if entry["run_id"] == "failed" else 20.0]
        simple_line(store, entry, psnr, **diagnostics)
    return attacked_ones(clients_of(load_runs([folder]).lines))


@pytest.mark.parametrize(
    ("facts", "name", "defended", "noisy"),
    [
        ({}, "plain", False, False),
        ({"dal": True}, "plain, DAL in the loss", False, False),
        ({"batch": 4}, "plain", False, False),
        ({"steps": 3}, "plain, steps 3", False, False),
        (MASKED, "MJP γ .27", True, False),
        ({"gamma": 1.0}, "MJP γ 1", True, False),
        ({"withhold": "pos_embed"}, "plain, withhold pos embed", True, False),
        ({"positions": "sinusoidal"}, "plain, positions sinusoidal", True, False),
        ({"position_noise": 0.01}, "plain, position noise 0.01", True, True),
        (
            MASKED | {"defenses": "gaussian_noise 0.01"},
            *("MJP γ .27, gaussian noise 0.01", True, True),
        ),
    ],
)
def test_names(
    tmp_path: Path, facts: dict[str, Any], name: str, defended: bool, noisy: bool
) -> None:
    (client,) = clients(tmp_path, intact("masked_span", **facts))
    assert (client.name, client.defended, client.noisy) == (name, defended, noisy)


@pytest.mark.parametrize(
    ("attack", "zero_rows", "masks"),
    [
        ("patch_gradient", 0.0, False),  # shuffles alone
        ("patch_gradient", 50.0, True),
        ("masked_span", 0.0, True),  # an attack that knows masks found them
    ],
)
def test_a_client_masks_where_the_upload_or_an_attack_says_so(
    tmp_path: Path, attack: str, zero_rows: float, masks: bool
) -> None:
    (client,) = clients(tmp_path, intact(attack, **MASKED), zero_rows=zero_rows)
    assert client.masks is masks
    assert client.name == ("MJP γ .27" if masks else "shuffled γ .27")


@pytest.mark.parametrize("attack", ["inverting_gradients", "april_optimization"])
def test_gradient_matching_tells_no_kind_of_shuffling(tmp_path: Path, attack: str) -> None:
    """It runs with and without masks, so that its success shows neither."""
    (client,) = clients(tmp_path / "alone", intact(attack, **MASKED))
    assert (client.name, client.masks) == ("γ .27", False)
    cells = [intact(name, **MASKED) for name in (attack, "masked_span")]
    (client,) = clients(tmp_path / "beside", *cells)
    assert client.name == "MJP γ .27"


def picture_alone(folder: Path, psnr: float | str, *, stored: bool) -> Client:
    store = RunStore(folder)
    entry = intact("masked_span", **MASKED)
    store.write_cells([entry])
    simple_line(store, entry, [psnr])
    if stored:
        add_pictures(store, "masked_span", {"images": torch.rand(1, 3, 8, 8)}, [image_id(0)])
    (client,) = attacked_ones(clients_of(load_runs([folder]).lines))
    return client


@pytest.mark.parametrize("psnr", [math.nan, "failed", "unscored"])
def test_a_stored_picture_is_a_reconstruction_and_no_number_is_none(
    tmp_path: Path, psnr: float | str
) -> None:
    stored = picture_alone(tmp_path / "stored", psnr, stored=True)
    assert (stored.name, matching(stored)) == ("MJP γ .27", ["masked_span"])
    nothing = picture_alone(tmp_path / "nothing", psnr, stored=False)
    assert (nothing.name, matching(nothing)) == ("γ .27", [])


def test_zero_rows_without_shuffling_are_no_mask(tmp_path: Path) -> None:
    (client,) = clients(tmp_path, intact("patch_gradient"), zero_rows=50.0)
    assert not client.masks


def matching(client: Client) -> list[str]:
    return [line.attack for line in client.matching]


def test_a_match_meets_the_trained_model_and_made_a_picture(tmp_path: Path) -> None:
    (client,) = clients(
        tmp_path,
        cell("april"),
        intact("failed", attack="patch_prior"),
        intact("patch_gradient"),
        intact("masked_span"),
        intact("grey", role="floor"),
    )
    assert matching(client) == ["patch_gradient", "masked_span"]


def test_a_match_for_a_masking_client_knows_masks(tmp_path: Path) -> None:
    names = ("april_unk_aware", "patch_gradient", "patch_prior", "masked_span", "unheard of")
    cells = [intact(name, **MASKED) for name in names]
    (client,) = clients(tmp_path, *cells, zero_rows=3.0)
    assert matching(client) == ["april_unk_aware", "masked_span"]


def test_an_attack_is_known_by_its_name_whatever_its_label(tmp_path: Path) -> None:
    (client,) = clients(
        tmp_path,
        intact("x", attack="masked_span", attack_name="patch_gradient", **MASKED),
        intact("y", attack="patch_gradient", attack_name="masked_span", **MASKED),
        zero_rows=3.0,
    )
    assert matching(client) == ["patch_gradient"]


def test_titles_say_what_differs_and_no_more(tmp_path: Path) -> None:
    found = clients(
        tmp_path,
        intact("one"),
        intact("two", model="ViT-S", dtype="float64"),
        intact("three", seed=4),
        intact("four", round=3),
    )
    assert client_titles(found) == [
        "DeiT-S, no defence used · seed 0",
        "ViT-S, no defence used · float64 · seed 0",
        "DeiT-S, no defence used · seed 4",
        "DeiT-S, no defence used · seed 0 · round 3",
    ]
    assert client_titles(found[:1]) == ["plain"]


def test_equal_titles_are_told_apart_by_their_first_line(tmp_path: Path) -> None:
    """Such as of two checkpoints under one label."""
    entries = (intact("one"), intact("grey", role="floor"), intact("two", checkpoint_sha="cd" * 32))
    found = clients(tmp_path, *entries, intact("three", **MASKED))
    assert client_titles(found) == [
        *("plain · line 1", "plain · line 3", "γ .27"),
    ]


@pytest.mark.parametrize(
    ("facts", "other", "found"),
    [
        ({"gamma": 0.5, "setting": "a"}, MASKED, ["grey"]),  # both ask for the plain picture
        ({"gamma": 0.27, "setting": "b"}, MASKED, []),  # what was fed is shuffled
        ({"gamma": 0.27, "setting": "b"}, {"gamma": 0.27, "setting": "b"}, ["grey"]),
        ({"gamma": 0.5, "setting": "b"}, {"gamma": 0.27, "setting": "b"}, []),
        ({"seed": 1}, MASKED, []),
        ({"size": 32}, MASKED, []),
        ({"augment": "flip"}, MASKED, []),
    ],
)
def test_floors_of_another_client_count_where_they_are_of_the_same_images(
    tmp_path: Path, facts: dict[str, Any], other: dict[str, Any], found: list[str]
) -> None:
    other = {"defenses": "int8"} | other
    first, second = clients(
        tmp_path,
        intact("masked_span", **facts),
        intact("other", attack="masked_span", **other),
        intact("grey", role="floor", **other),
    )
    assert [line.attack for line in first.floors] == found
    assert [line.attack for line in second.floors] == ["grey"]
