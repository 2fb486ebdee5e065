"""Names of images with characters that turn the direction of words: written out on the page."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.cli import main
from tests.helpers.runs import attack, one_cell, photographs

TURNS, ISOLATES = "\u202e", "\u2066"


def test_no_page_table_or_line_turns_a_name(tmp_path: Path, capsys: object) -> None:
    images = photographs(tmp_path / "images", 2, labelled=False)
    (images / "0.png").rename(images / f"a{TURNS}gpj.png")
    (images / f"b{ISOLATES}x.png").write_bytes(b"no image")
    attack(images, tmp_path / "run", one_cell(attacks=[{"name": "patch_gradient"}]))
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()  # type: ignore[attr-defined]
    texts = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.[hmt]*")}
    assert {"index.html", "table.md", "table.tex"} <= texts.keys()
    texts |= {"out": printed.out, "err": printed.err}
    for name, text in texts.items():
        assert TURNS not in text, name
        assert ISOLATES not in text, name
    assert "a⟨U+202E⟩gpj.png" in texts["index.html"]
    assert "b⟨U+2066⟩x.png" in texts["index.html"]
