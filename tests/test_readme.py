"""The README's Python block runs as it stands, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
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
