"""Headers with one bad field, made from the schema: `check` and a run name it, and say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.client.recorded.examined import examine
from mjp_privacy.client.recorded.folder import UploadFolder
from mjp_privacy.client.recorded.groups import REFUSED
from mjp_privacy.client.recorded.header import UploadHeader, read_header
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.check_uploads import check_uploads
from tests.helpers.uploads import NAME, ONE, attacked, edit_all
from tests.inputs.values import BadContent, bad_contents

MOST = 6000
"""Characters of a message."""

GOOD: dict[str, Any] = {
    "label": "my client",
    "weights": "weights/round_17.safetensors",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "format": 1,
    "weights_sha256": "0" * 64,
    "model": {"model": "vit_small_patch16_224", "img_size": 32, "mlp_ratio": 4.0},
    "round": 17,
    "client": "3",
    "series": "cat",
    "kind": "weight_difference",
    "dtype": "float32",
    "batch": 1,
    "steps": 2,
    "optimizer": "sgd",
    "momentum": 0.5,
    "lr": 0.1,
    "weight_decay": 0.1,
    "autocast": "bf16",
    "gamma": 0.27,
    "recipe": {"dal": True, "dal_lambda": 0.1, "withhold": ["cls_token"], "mask": "image"},
    "noise": {"pos_embed": 0.1},
    "rounding": {"pos_embed": 0.1},
    "undeclared": False,
    "labels": [3],
    "partial": True,
}
CASES = list(bad_contents(UploadHeader, GOOD))


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_good_header_is_read_and_names_every_field(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "a.json", GOOD)).labels == (3,)
    assert set(GOOD) == set(UploadHeader.__dataclass_fields__)


def _title(case: BadContent) -> str:
    return f"{case.place}: {case.bad.title}"


@pytest.mark.parametrize("certain", [True, False])
def test_every_bad_field_is_refused_by_its_name(tmp_path: Path, certain: bool) -> None:
    """Those that may be legal are read, or refused as clearly; nothing else is raised."""
    wrong = []
    chosen = [case for case in CASES if case.bad.certain == certain]
    assert len(chosen) > 100
    for case in chosen:
        try:
            read_header(written(tmp_path / "a.json", case.content))
        except UserError as error:
            said = str(error)
            if case.field not in said or "a.json" not in said or len(said) > MOST:
                wrong.append(f"{_title(case)}: {said[:300]}")
        else:
            if certain:
                wrong.append(f"{_title(case)}: accepted")
    assert not wrong, "\n".join(wrong[:20])


RECIPES = [
    ("dal", "yes"),
    ("dal_lambda", -1),
    ("dal_lambda", "0.1"),
    ("plain_share", 1.5),
    ("mask", "none"),
    ("withhold", "pos_embed"),
    ("withhold", ["x" * 5000]),
    ("position_noise", 1e300),
    ("defenses", [{"int8": 5}]),
    ("defenses", ["{a: &a [*a]}"]),
    ("surprise", 1),
    ("optimizer", "x" * 5000),
    ("steps", True),
    ("momentum", 10**400),
]


@pytest.mark.parametrize(("field", "value"), RECIPES)
def test_a_recipe_is_a_clients_config(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"a\.json, recipe: .*{field}"):
        read_header(written(tmp_path / "a.json", GOOD | {"recipe": {field: value}}))


EVERY = {
    **{"label": 5, "weights": "x" * 5000, "mean": [0.5], "std": [0, 1, 1], "format": 2},
    **{"weights_sha256": "0", "model": {"img_size": 10**9}, "round": 10**30, "client": 3},
    **{"series": "a\x1b[2Jb", "kind": "weights", "dtype": "float8", "batch": 0, "steps": -1},
    **{"optimizer": ["sgd"], "momentum": 2, "lr": 0, "weight_decay": 10**400, "gamma": -0.1},
    **{"recipe": {"mode": 5}, "noise": {"pos_embed": -1}, "rounding": [1], "undeclared": 1},
    **{"labels": [-1], "partial": "no", "autocast": "half"},
}


def test_check_and_a_run_say_the_same_of_every_field(folder: Path) -> None:
    """An upload for each field of the header, all in one folder; the good ones are attacked."""
    edit_all(folder, series=None)
    assert set(EVERY) == set(UploadHeader.__dataclass_fields__)
    held = json.loads((folder / f"{NAME}.json").read_text())
    for field, value in EVERY.items():
        written(folder / f"bad_{field}.json", held | {field: value})
    text, usable = check_uploads(folder)
    assert not usable
    summary, scores, _ = attacked(folder, **ONE)
    assert summary.exit_code == 3
    refused = scores[scores.model == REFUSED].set_index("image_id")["reason"]
    assert set(refused.index) == {f"bad_{field}" for field in EVERY}
    assert dict(refused) == examine(UploadFolder(folder)).reasons
    for field in EVERY:
        assert f"FAULT  bad_{field}: {refused[f'bad_{field}']}" in text
        assert field in refused[f"bad_{field}"]
    assert (scores.status == "ok").sum() == 4
