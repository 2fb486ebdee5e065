"""The README's Python block runs as it stands, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mjp_privacy.own.leak import Leak

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


OWN_GRADIENTS, PACKAGE = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run_block(block: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names that a block of ten lines or less has defined at its end."""
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    (folder / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_own_gradients_give_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leak = run_block(OWN_GRADIENTS, tmp_path, monkeypatch)["leak"]
    assert isinstance(leak, Leak)
    assert leak.scores is not None
    assert bool(leak.scores.set_index("attack")["exact"]["patch_gradient"])
    assert leak.best.residual < 1e-4
    assert (leak.label_source, leak.labels.tolist()) == ("read off the gradient", [7])  # type: ignore[union-attr]
    assert (tmp_path / "leak.png").is_file()


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_block(PACKAGE, tmp_path, monkeypatch)
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


def test_configs_named_in_the_readme_exist() -> None:
    for name in re.findall(r"configs/\w+\.yaml", README):
        assert (ROOT / name).is_file(), name
