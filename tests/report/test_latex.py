"""table.tex goes through a real TeX, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mjp_privacy.report.tables.text import latex_text
from mjp_privacy.report.write import ReportSummary, write_report
from tests.helpers.report_rows import HOSTILE

DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,graphicx,textcomp}
\usepackage[T1]{fontenc}
\begin{document}
\input{table.tex}
\end{document}
"""


def test_every_character_becomes_ascii() -> None:
    assert latex_text("≥ 20 dB · naïve … ‖g‖ 漢") == (
        r"$\geq$ 20 dB \textperiodcentered{} naive \dots{} $\|$g$\|$ ?"
    )
    assert latex_text(HOSTILE).isascii()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_the_tables_compile(written: tuple[Path, ReportSummary], tmp_path: Path) -> None:
    run = written[0].parent / "run"
    write_report([run], tmp_path / "out", everything=True, pictures="none")
    shutil.copy(tmp_path / "out" / "table.tex", tmp_path)
    (tmp_path / "paper.tex").write_text(DOCUMENT, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "paper.pdf").stat().st_size > 1000
