"""The Python blocks of README and its page on own gradients run as they stand; README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mjp_privacy.uploads.leak import Leak
from tests.helpers.night import nightly
from tests.helpers.runs import one_cell

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
(OWN_GRADIENTS,) = PYTHON.findall(README)
(PACKAGE,) = PYTHON.findall((ROOT / "docs" / "own_gradients.md").read_text(encoding="utf-8"))


def small_vit() -> object:
    """torchvision's, with patches and layers that are quickly done."""
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 256, "mlp_dim": 512}
    return VisionTransformer(image_size=224, patch_size=16, **sizes)


each_size = pytest.mark.parametrize("whole", [False, nightly(True)])
"""The block as it stands at night; by day its network and its experiment are small ones."""


def run_block(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> dict[str, object]:
    """The names that a block of ten lines or less has defined at its end."""
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    if whole:
        (folder / "configs").symlink_to(ROOT / "configs")
    else:
        (folder / "configs").mkdir()
        (folder / "configs" / "demo.yaml").write_text(yaml.safe_dump(one_cell()))
        if "torchvision" in block:
            monkeypatch.setattr("torchvision.models.vit_b_32", small_vit)
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@each_size
def test_own_gradients_give_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    leak = run_block(OWN_GRADIENTS, tmp_path, monkeypatch, whole)["leak"]
    assert isinstance(leak, Leak)
    assert leak.scores is not None
    scores = leak.scores.set_index("attack").loc["patch_gradient"]
    assert bool(scores["exact"]) if whole else float(scores["psnr"]) > 60
    assert leak.best.residual < 1e-4
    assert (leak.label_source, leak.labels.tolist()) == ("read off the gradient", [7])  # type: ignore[union-attr]
    assert (tmp_path / "leak.png").is_file()


@each_size
def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    names = run_block(PACKAGE, tmp_path, monkeypatch, whole)
    scores = names["scores"]
    assert isinstance(scores, dict)
    assert {variant for _, variant in scores} == {"paper", "standard"}
    assert all(values.shape == (2,) for values in scores.values())
    assert getattr(names["summary"], "exit_code", None) == 0
    assert names["target"].shape == names["prediction"].shape == (156, 2)  # type: ignore[attr-defined]


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_is_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1300


def test_configs_named_in_the_readme_exist() -> None:
    for name in re.findall(r"configs/\w+\.yaml", README):
        assert (ROOT / name).is_file(), name
