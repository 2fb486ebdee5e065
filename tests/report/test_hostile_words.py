"""A real run whose images, model and folder have hostile names, through every output of a report.

What strangers named must be read as text in each: as no element of HTML, no link of Markdown, no
command of LaTeX, no formula of a spreadsheet, no code of a terminal, no file outside the folder."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from mjp_privacy.cli import main
from mjp_privacy.report.text import latex_text
from tests.helpers import runs
from tests.report.test_charts import ELEMENTS
from tests.report.test_page import Reader

MODEL = r"=[m](https://m.example)<b>`|$\frac{1}^^M_~*＼input{x}"
IMAGES = [
    "<img src=x onerror=alert(1)>\"'.png",
    "[x](https://x.example).png",
    r"$\frac{^_%&#.png",
    "=HYPERLINK(A1).png",
    "line break `|` </script>.png",
    "*bold* __x__ ~~y~~ www.w.example.png",
    "@cmd a@b.example #1 ${jndi} {{7*7}}.png",
    "a\u202egpj.png",
]
RUN = "run <u>\u202e"
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run; its report lies beside it."""
    root = tmp_path_factory.mktemp("hostile")
    for number, name in enumerate(IMAGES):
        path = root / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)  # `</script>` is a folder's name
        runs.photograph(number).save(path, "PNG")
    (root / "images" / "-broken <i>\u2066x.png").write_bytes(b"no image")
    grid = [{"models": [MODEL], "settings": ["a", "c"], "gammas": [0.5]}]
    runs.attack(root / "images", root / RUN, runs.tiny(models={MODEL: runs.MJP}, grid=grid))
    return root


@pytest.fixture(scope="module")
def out(report: Path) -> Path:
    arguments = [str(report / RUN), "--out", str(report / "out")]
    assert main(["report", *arguments, "--pictures", "all"]) == 0
    return report / "out"


def test_the_page_has_no_element_or_address_of_theirs(out: Path) -> None:
    elements = Reader((out / "index.html").read_text(encoding="utf-8")).elements
    folder = Path(__file__).parents[2] / "mjp_privacy" / "report"
    pages = [*folder.glob("templates/*"), folder / "write.py"]
    own = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    own += "".join(f"<{tag.lower()}" for tag in ELEMENTS)
    assert {tag for tag, _, _ in elements if f"<{tag}" not in own} == set()
    assert not [name for _, has, _ in elements for name in has if name.startswith("on")]
    for link in (has[name] for _, has, _ in elements for name in ("href", "src") if name in has):
        assert link.startswith(("#", "data:")) or re.fullmatch(r"[\w./-]+", link), link
    data, script = ("".join(texts) for tag, _, texts in elements if tag == "script")
    assert any("<img src=x onerror" in image for image in json.loads(data)["image_ids"])
    assert "alert" not in script
    assert "\x1b" not in data + script


def test_markdown_renders_without_their_links(out: Path) -> None:
    text = (out / "table.md").read_text(encoding="utf-8")
    tokens = MARKDOWN.parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in inline}
    assert kinds <= {"text", "text_special", "strong_open", "strong_close", "html_inline"}
    assert {t.content for t in inline if t.type == "html_inline"} <= {"<!-- -->"}
    assert MODEL.split("\x1b")[0][:20] in "".join(token.content for token in inline)
    assert not re.search(r"(?<!\\)://|(?<!\\)\bwww\.", text.replace(r"\:", ""))
    assert {token.type for token in tokens} & {"fence", "code_block", "html_block", "hr"} == set()
    columns = [line.count("|") - line.count(r"\|") for line in text.splitlines() if line[:1] == "|"]
    assert min(columns) > 2


DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,graphicx,textcomp}
\usepackage[T1]{fontenc}
\begin{document}
\input{table.tex}
\end{document}
"""


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


@pytest.mark.parametrize("name", ["table.csv", "samples.csv", "pictures/index.csv"])
def test_no_cell_of_a_csv_is_a_formula(name: str, out: Path) -> None:
    with (out / name).open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    texts = [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t"))]
    number = r"[+-]?[\d.]+(e[+-]?\d+)?|-?inf"
    assert [cell for cell in texts if not re.fullmatch(number, cell)] == []
    assert any(cell.startswith("'=") for cell in cells)
    assert not any("\x1b" in cell for cell in cells)


def test_files_lie_in_the_folder_under_plain_names(out: Path, report: Path) -> None:
    for path in out.rglob("*"):
        assert re.fullmatch(r"[A-Za-z0-9._+-]+", path.name), path
    clients = [path for path in (out / "pictures").iterdir() if path.is_dir()]
    assert [len(list(client.glob("original/*.png"))) for client in clients] == [len(IMAGES)] * 2
    assert {path.name for path in report.iterdir()} == {"images", "out", RUN}


def test_no_terminal_page_or_table_shows_a_code_or_turn_of_theirs(
    out: Path, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(report / RUN), "--out", str(out)]) == 0
    assert main(["report", str(report / RUN / "rows"), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    for line in (printed.out + printed.err).split("\n"):
        assert line.isprintable(), line
    assert r"run <u>\u202e/rows" in printed.err
    texts = {path.name: path.read_text() for path in out.glob("*.[hmt]*")}
    assert {"index.html", "table.md", "table.tex"} <= texts.keys()
    for name, text in texts.items():
        assert not re.search("[\u202e\u2066]", text), name
    assert "-broken <i>⟨U+2066⟩x.png".replace("<i>", "&lt;i&gt;") in texts["index.html"]
