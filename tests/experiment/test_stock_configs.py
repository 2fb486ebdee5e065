"""Stock configs whose rows need a file of one's own stand apart from those that need none."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from mjp_privacy.experiment.identity import cell_key, run_id

from mjp_privacy.experiment.config import expand
from mjp_privacy.experiment.config_files import load_experiment

CONFIGS = Path(__file__).parents[2] / "configs"
TRAINED_HERE = "results/training/vit_tiny_mjp/model.safetensors"


def identities(*names: str) -> list[tuple[str, str]]:
    """cell_key and run_id of every cell of these configs, in the order of the table."""
    experiments = [load_experiment(CONFIGS / f"{name}.yaml") for name in names]
    return [(cell_key(c, e), run_id(c, e, None, True)) for e in experiments for c in expand(e)]


@pytest.mark.parametrize(
    ("names", "cells", "digest"),
    [
        (("ladder", "ladder_finetuned"), 38, "76d01e51e4da7299"),
        (("table5_vit_tiny", "table5_finetuned"), 34, "f848a3b4a49bc0d3"),
    ],
)
def test_both_halves_have_the_cells_of_the_config_they_were(
    names: tuple[str, str], cells: int, digest: str
) -> None:
    """Rows that were made before the halves were parted stay finished, in the same order."""
    found = identities(*names)
    assert len(found) == cells
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:16] == digest


def test_the_whole_table_goes_on_from_the_rows_that_timm_has() -> None:
    whole, timm = identities("table5"), identities("table5_timm")
    assert set(timm) < set(whole)
    models = load_experiment(CONFIGS / "table5.yaml").models
    own = {name for name, model in models.items() if str(model.model).startswith("deit_small_")}
    assert len(timm) == sum(
        cell.model not in own for cell in expand(load_experiment(CONFIGS / "table5.yaml"))
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_stock_command_names_a_file_for_every_model_that_needs_one(path: Path) -> None:
    """A plain checkpoint is enough for a model without MJP; one that was fine-tuned is made by the
    command that the header names."""
    head = path.read_text().split("\nname:")[0]
    command = re.search(rf"mjp attack configs/{path.name}(.*?)(?=\n#\s*mjp |\n#\n)", head, re.S)
    assert command is not None
    for name in load_experiment(path).models:
        if "fine-tuned" not in name:
            continue
        given = f"{name}=" in command[1] or TRAINED_HERE in command[1]
        assert given, f"{path.name}: {name}"
        assert "vit_tiny_finetune.yaml" in head
        others = [n for n in load_experiment(path).models if "fine-tuned" not in n]
        assert not others or f"{name}=" in command[1], f"{path.name}: {name} is not named"
