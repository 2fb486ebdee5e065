"""Headers of uploads with one bad field, made from the schema: each is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.core.errors import UserError
from mjp_privacy.uploads.header import UploadHeader, read_header
from tests.inputs.values import BadContent, bad_contents


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


MOST = 6000


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
            named = case.field in said or "entry: NaN" in said  # what is no JSON is named there
            if not named or "a.json" not in said or len(said) > MOST:
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
