"""The notebook of own gradients runs as it stands, and says what its committed outputs say."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "own_gradients.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What a cell wrote to stdout when it was last run."""
    streams = [output for output in cell["outputs"] if output.get("name") == "stdout"]
    return "".join("".join(output["text"]) for output in streams)


def test_the_committed_outputs_are_of_one_run_without_an_error_and_have_the_picture() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert NOTEBOOK.stat().st_size < 1 << 20


@pytest.mark.nightly  # by day the same lines run in README's test, on a smaller network
def test_the_notebook_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code_cells():
        said = io.StringIO()
        lines = [line for line in cell["source"] if not line.startswith("%")]
        with contextlib.redirect_stdout(said):
            exec(compile("".join(lines), NOTEBOOK.name, "exec"), names)
        if "verdict" in cell["id"]:
            exact, certain = (part in said.getvalue() for part in ("1 of 1 exact", "certain"))
            assert (exact, certain) == ("1 of 1 exact" in printed(cell), "certain" in printed(cell))
    assert bool(names["leak"].scores.set_index("attack").loc["patch_gradient", "exact"])
