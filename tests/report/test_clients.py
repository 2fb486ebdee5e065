"""What a report calls a client, whether it is defended, and which attacks match it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.clients import Client
from mjp_privacy.report.contents import read_contents
from tests.helpers.ladder_rows import run_of
from tests.helpers.report_rows import add_pictures, cell, image_id, intact

MASKED: dict[str, Any] = {"setting": "c", "gamma": 0.27}


def clients(folder: Path, *cells: dict[str, Any], **diagnostics: float) -> list[Client]:
    """Those with an attack, of a run of these cells."""
    lines = ((entry, ["failed" if entry["run_id"] == "failed" else 20.0]) for entry in cells)
    run_of(folder, *((*line, diagnostics) for line in lines))
    return [client for client in read_contents([folder]).clients if client.attacks]


def matching(client: Client) -> list[str]:
    return [line.attack for line in client.matching]


@pytest.mark.parametrize(
    ("facts", "name", "defended", "noisy"),
    [
        ({}, "plain", False, False),
        ({"dal": True}, "plain, DAL in the loss", False, False),
        ({"batch": 4}, "plain", False, False),
        ({"a fact of another version": ["a", {"b": 1}]}, "plain", False, False),
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
    ("attacks", "facts", "zero_rows", "name"),
    [
        (["patch_gradient"], MASKED, 0.0, "shuffled γ .27"),
        (["patch_gradient"], MASKED, 50.0, "MJP γ .27"),
        (["patch_gradient"], {}, 50.0, "plain"),  # zero rows without shuffling are no mask
        (["masked_span"], MASKED, 0.0, "MJP γ .27"),  # an attack that knows masks found them
        # gradient matching runs with and without masks, so that its success shows neither
        (["inverting_gradients"], MASKED, None, "γ .27"),
        (["april_optimization"], MASKED, None, "γ .27"),
        (["inverting_gradients", "masked_span"], MASKED, None, "MJP γ .27"),
    ],
)
def test_a_client_masks_where_the_upload_or_an_attack_says_so(
    tmp_path: Path,
    attacks: list[str],
    facts: dict[str, Any],
    zero_rows: float | None,
    name: str,
) -> None:
    diagnostics = {} if zero_rows is None else {"zero_rows": zero_rows}
    (client,) = clients(tmp_path, *(intact(a, **facts) for a in attacks), **diagnostics)
    assert (client.name, client.masks) == (name, name.startswith("MJP"))


@pytest.mark.parametrize("psnr", [math.nan, "failed", "unscored"])
@pytest.mark.parametrize("stored", [True, False])
def test_a_stored_picture_is_a_reconstruction_and_no_number_is_none(
    tmp_path: Path, psnr: float | str, stored: bool
) -> None:
    run_of(tmp_path, (intact("masked_span", **MASKED), [psnr]))
    if stored:
        pictures = {"images": torch.rand(1, 3, 8, 8)}
        add_pictures(RunStore(tmp_path), "masked_span", pictures, [image_id(0)])
    (client,) = read_contents([tmp_path]).clients
    expected = ("MJP γ .27", ["masked_span"]) if stored else ("γ .27", [])
    assert (client.name, matching(client)) == expected


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


def test_a_match_for_a_masking_client_knows_masks_by_its_name_whatever_its_label(
    tmp_path: Path,
) -> None:
    names = ("april_unk_aware", "patch_gradient", "patch_prior", "masked_span", "unheard of")
    cells = [intact(name, **MASKED) for name in names]
    cells.append(intact("x", attack="masked", attack_name="patch_gradient", **MASKED))
    cells.append(intact("y", attack="plain", attack_name="masked_span", **MASKED))
    (client,) = clients(tmp_path, *cells, zero_rows=3.0)
    assert matching(client) == ["april_unk_aware", "masked_span", "plain"]


@pytest.mark.parametrize(
    ("cells", "titles"),
    [
        ([intact("one")], ["plain"]),
        (
            [
                intact("one"),
                intact("two", model="ViT-S", dtype="float64"),
                intact("three", seed=4),
                intact("four", round=3),
            ],
            [
                "DeiT-S, no defence used · seed 0",
                "ViT-S, no defence used · float64 · seed 0",
                "DeiT-S, no defence used · seed 4",
                "DeiT-S, no defence used · seed 0 · round 3",
            ],
        ),
        (  # equal ones, as of two checkpoints under one label, are told apart by their first line
            [
                intact("one"),
                intact("grey", role="floor"),
                intact("two", checkpoint_sha="cd" * 32),
                intact("three", **MASKED),
            ],
            ["plain · line 1", "plain · line 3", "γ .27"],
        ),
    ],
)
def test_titles_say_what_differs_and_no_more(
    tmp_path: Path, cells: list[dict[str, Any]], titles: list[str]
) -> None:
    assert [client.title for client in clients(tmp_path, *cells)] == titles


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
