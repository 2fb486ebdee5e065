"""The accelerator gives the CPU's numbers: gradients, attack and a whole run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from attacks import find_attack
from mjp_privacy.experiment.run import run_experiment
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view
from tests.helpers.runs import cells, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("name", ["april", "april_unk_aware"])
@pytest.mark.parametrize("setting", ["a", "b"])
def test_planted_attack(name: str, setting: str) -> None:
    attack, found = find_attack(name), []
    for device in ("cpu", "cuda"):
        model = planted_model(unknown_embedding=True).to(device)
        view, _ = planted_view(model, attack, setting, images=planted_images())
        images = attack.run(view, generator=torch.Generator()).images
        assert images is not None
        found.append(images.cpu())
    assert (found[0] - found[1]).abs().max() <= 1e-6


def test_whole_run(tmp_path: Path) -> None:
    values = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        config = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
        assert run_experiment(config, out=out, limit=4, device=device).exit_code == 0
        exact = [cell["run_id"] for cell in cells(out) if cell["dtype"] == "float64"]
        found = rows(out, exact)
        scores = found[found["variant"].isin(["paper", "standard"])]
        values.append(scores["value"].clip(upper=60).to_numpy())
    assert values[0].shape == values[1].shape
    assert pd.Series(abs(values[0] - values[1])).max() <= 0.05
