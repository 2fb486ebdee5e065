"""Eight image pairs scored by the paper's own definitions, elsewhere."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mjp_privacy.metrics import score

TOLERANCES = {"mse": 1e-6, "psnr": 1e-3, "ssim": 1e-4, "fft2d": 1e-6, "lpips": 5e-4}


@pytest.fixture(scope="module")
def expected(shared_data: Path) -> dict[str, dict[str, float]]:
    text = (shared_data / "reference" / "metric_pairs.json").read_text(encoding="utf-8")
    return json.loads(text)["scores"]


@pytest.fixture(scope="module")
def computed(shared_data: Path, expected: dict) -> dict:
    with zipfile.ZipFile(shared_data / "reference" / "metric_pairs.zip") as archive:

        def read(folder: str) -> np.ndarray:
            files = [io.BytesIO(archive.read(f"{folder}/{name}")) for name in expected]
            pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
            return pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255

        return score(read("reconstruction"), read("reference"))


@pytest.mark.parametrize("metric", TOLERANCES)
def test_paper_variant_gives_the_recorded_scores(metric: str, computed, expected) -> None:
    wanted = np.array([scores[metric] for scores in expected.values()])
    assert len(wanted) == 8
    np.testing.assert_allclose(computed[metric, "paper"], wanted, rtol=0, atol=TOLERANCES[metric])
