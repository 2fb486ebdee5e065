"""A real run whose images, model and folder have hostile names, through every output of a report.

What strangers named must be read as text in each: as no element of HTML, no link of Markdown, no
command of LaTeX, no formula of a spreadsheet, no code of a terminal, no file outside the folder."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from mjp_privacy.cli import main
from mjp_privacy.report.tables.text import latex_text, markdown_text
from tests.helpers import runs
from tests.helpers.runs import attack, one_cell, photographs
from tests.report.page.test_page import Reader
from tests.report.test_charts import ELEMENTS

MODEL = r"=[m](https://m.example)<b>`|$\frac{1}^^M_~*＼input{x}"
IMAGES = [
    "<img src=x onerror=alert(1)>\"'.png",
    "[x](https://x.example).png",
    r"$\frac{^_%&#.png",
    "=HYPERLINK(A1).png",
    "esc\x1b[2J\x07.png",
    "line\nbreak `|` </script>.png",
    "*bold* __x__ ~~y~~ www.w.example.png",
    "@cmd a@b.example #1 ${jndi} {{7*7}}.png",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report; beside it what was printed."""
    root = tmp_path_factory.mktemp("hostile")
    images = root / "images"
    for number, name in enumerate(IMAGES):
        path = images / name
        path.parent.mkdir(parents=True, exist_ok=True)  # `</script>` is a folder's name
        runs.photograph(number).save(path, "PNG")
    (images / "-broken <i>.png").write_bytes(b"no image")
    grid = [{"models": [MODEL], "settings": ["a", "c"], "gammas": [0.5]}]
    config = runs.tiny(models={MODEL: runs.MJP}, grid=grid)
    run = root / "run <u>\u202e"
    runs.attack(images, run, config)
    return root


@pytest.fixture(scope="module")
def out(report: Path) -> Path:
    arguments = [str(report / "run <u>\u202e"), "--out", str(report / "out"), "--all"]
    assert main(["report", *arguments, "--pictures", "all"]) == 0
    return report / "out"


def templates() -> str:
    folder = Path(__file__).parents[2] / "mjp_privacy" / "report"
    pages = [*folder.glob("page/templates/*"), *folder.glob("page/*.py")]
    sources = [path.read_text(encoding="utf-8") for path in pages]
    return "\n".join([*sources, "<a class href title>", *(f"<{tag.lower()}" for tag in ELEMENTS)])


def test_the_page_has_no_element_or_address_of_theirs(out: Path) -> None:
    elements = Reader((out / "index.html").read_text(encoding="utf-8")).elements
    tags, own = {tag for tag, _, _ in elements}, templates()
    assert {tag for tag in tags if f"<{tag}" not in own} == set()
    assert not tags & {"i onerror", "img onerror", "iframe", "object", "form action", "u"}
    assert not [name for _, has, _ in elements for name in has if name.startswith("on")]
    for link in (has[name] for _, has, _ in elements for name in ("href", "src") if name in has):
        assert link.startswith(("#", "data:")) or re.fullmatch(r"[\w./-]+", link), link
    data, script = ("".join(texts) for tag, _, texts in elements if tag == "script")
    shown = json.loads(data)
    assert any("<img src=x onerror" in image for image in shown["image_ids"])
    assert "alert" not in script
    assert "\x1b" not in data + script


def test_markdown_renders_without_their_links(out: Path) -> None:
    text = (out / "table.md").read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in inline}
    assert kinds <= {"text", "text_special", "strong_open", "strong_close", "html_inline"}
    assert {t.content for t in inline if t.type == "html_inline"} <= {"<!-- -->"}
    said = "".join(token.content for token in inline)
    assert MODEL.split("\x1b")[0][:20] in said
    assert not re.search(r"(?<!\\)://|(?<!\\)\bwww\.", text.replace(r"\:", ""))
    blocks = {token.type for token in tokens}
    assert blocks & {"fence", "code_block", "html_block", "hr"} == set()
    columns = [line.count("|") - line.count(r"\|") for line in text.splitlines() if line[:1] == "|"]
    assert min(columns) > 2


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles_and_runs_nothing_of_theirs(out: Path, tmp_path: Path) -> None:
    shutil.copy(out / "table.tex", tmp_path)
    (tmp_path / "paper.tex").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "x.tex").write_text(r"\errmessage{their file was read}", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert r"\input" not in (out / "table.tex").read_text(encoding="ascii")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("＼input｛x｝", r"\textbackslash{}input\{x\}"),
        ("100％ ＄ ＃ ＿ ＆", r"100\% \$ \# \_ \&"),
        ("[x] y", "{}[x] y"),
        ("*x", "{}*x"),
        ("a\x1b[2J\x7f\x00b", "a [2J  b"),
        ("^^M~", r"\textasciicircum{}\textasciicircum{}M\textasciitilde{}"),
    ],
)
def test_letters_in_disguise_are_escaped_in_latex(text: str, expected: str) -> None:
    assert latex_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("[a](x)", "[a][b]", "![a](x)", "<https://a.example>", "https://a.example"),
        *("www.a.example", "_a_", "__a__", "*a*", "~~a~~", "`a`", "a@b.example"),
        *("&lt;b&gt;", "<b>", "a_b", "$a$"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    rendered = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .render(f"| a |\n| --- |\n| {markdown_text(text)} |\n")
    )
    tags = set(re.findall(r"</?(\w+)", rendered))
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td"}


def cells_of(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return [cell for row in csv.reader(file) for cell in row]


@pytest.mark.parametrize("name", ["table.csv", "samples.csv", "pictures/index.csv"])
def test_no_cell_of_a_csv_is_a_formula(name: str, out: Path) -> None:
    cells = cells_of(out / name)
    texts = [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t"))]
    assert [
        cell for cell in texts if not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?|-?inf", cell)
    ] == []
    assert any(cell.startswith("'=") for cell in cells)
    assert not any("\x1b" in cell for cell in cells)


def test_numbers_of_a_csv_are_exact(out: Path, report: Path) -> None:
    written = pd.read_csv(out / "samples.csv", float_precision="round_trip")
    stored = runs.rows(report / "run <u>\u202e")
    values = written[written["status"] == "ok"]["value"].sort_values()
    assert values.tolist() == stored[stored["status"] == "ok"]["value"].sort_values().tolist()


def test_files_lie_in_the_folder_under_plain_names(out: Path, report: Path) -> None:
    for path in out.rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9._+-]+", path.name), path
    clients = [path for path in (out / "pictures").iterdir() if path.is_dir()]
    for client in clients:
        assert len(list(client.glob("original/*.png"))) == len(IMAGES)
    assert len(clients) == 2
    assert {path.name for path in report.iterdir()} == {"images", "out", "run <u>\u202e"}


def test_the_terminal_shows_no_code_of_theirs(
    out: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = report / "run <u>\u202e"
    assert main(["report", str(run), "--out", str(out), "--all"]) == 0
    assert main(["report", str(run / "rows"), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    for line in (printed.out + printed.err).split("\n"):
        assert line.isprintable(), line
    assert r"run <u>\u202e/rows is not a run folder" in printed.err


# table.tex goes through a real tex, where one is installed ----------------------------------------

DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,graphicx,textcomp}
\usepackage[T1]{fontenc}
\begin{document}
\input{table.tex}
\end{document}
"""


# names of images with characters that turn the direction of words ---------------------------------

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
