"""What the pages say can be done: their Python runs, their commands are understood, their links
lead somewhere, and the notebook says what its committed outputs say.
"""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mjp_privacy.cli import main
from mjp_privacy.core.command import Usage
from mjp_privacy.core.errors import UserError
from tests.helpers.night import nightly
from tests.helpers.runs import one_cell

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "attacks/*.md", "results/**/*.md", "mjp_privacy/**/*.md")
    for page in ROOT.glob(pattern)
)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
(OWN_GRADIENTS,) = PYTHON.findall(README)
(PACKAGE,) = PYTHON.findall((ROOT / "docs" / "own_gradients.md").read_text(encoding="utf-8"))


# Python -------------------------------------------------------------------------------------------


def small_vit() -> object:
    """torchvision's, with patches and layers that are quickly done."""
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 256, "mlp_dim": 512}
    return VisionTransformer(image_size=224, patch_size=16, **sizes)


each_size = pytest.mark.parametrize("whole", [False, nightly(True)])
"""The block as it stands at night; by day its network and its experiment are small ones."""


def run_block(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> dict[str, Any]:
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
    torch.manual_seed(1)  # the block draws weights: with some of them its picture is not certain
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@each_size
def test_own_gradients_give_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    leak = run_block(OWN_GRADIENTS, tmp_path, monkeypatch, whole)["leak"]
    scores = leak.scores.set_index("attack").loc["patch_gradient"]
    assert bool(scores["exact"]) if whole else float(scores["psnr"]) > 60
    assert leak.best.residual < 1e-4
    assert (leak.label_source, leak.labels.tolist()) == ("read off the gradient", [7])
    assert (tmp_path / "leak.png").is_file()


@each_size
def test_the_package_is_used_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    names = run_block(PACKAGE, tmp_path, monkeypatch, whole)
    assert {variant for _, variant in names["scores"]} == {"paper", "standard"}
    assert all(values.shape == (2,) for values in names["scores"].values())
    assert names["summary"].exit_code == 0
    assert names["target"].shape == names["prediction"].shape == (196, 2)
    assert int(names["visible"].sum()) == 156


# README -------------------------------------------------------------------------------------------


def test_every_link_leads_somewhere_and_the_readme_is_read_in_ten_minutes() -> None:
    links = {
        page: re.findall(r"\]\((?!http)([^)#\s]+)\)", page.read_text("utf-8")) for page in PAGES
    }
    broken = [
        (p, link) for p, own in links.items() for link in own if not (p.parent / link).exists()
    ]
    assert broken == []
    assert {"SECURITY.md", "docs/reliability.md"} <= {*links[ROOT / "README.md"]}
    assert all((ROOT / name).exists() for name in re.findall(r"configs/\w+\.yaml", README))
    assert (len(README.splitlines()) <= 150, len(README.split()) <= 1300) == (True, True)


def test_every_page_is_on_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert pages - {*re.findall(r": (\S+\.md)", navigation)} == set()


# commands -----------------------------------------------------------------------------------------

BLOCK = re.compile(r"^\s*```\w*\n(.*?)^\s*```", re.MULTILINE | re.DOTALL)


def command_lines() -> Iterator[tuple[str, str]]:
    """The page and the words behind `mjp` of every command in a block."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            text = re.sub(r"\$\([^)]*\)", "NAME=model.safetensors", block.replace("\\\n", " "))
            text = re.sub(r"\$\{?\w+\}?", "J", text.replace("$preset", "paper"))
            for line in text.splitlines():
                if found := re.match(r"\s*(?:.* -m mjp_privacy|mjp) +(.*)", line):
                    yield str(page.relative_to(ROOT)), found[1]


COMMANDS = sorted(set(command_lines()))


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{p}: {x}"[:90] for p, x in COMMANDS])
def test_a_documented_command_is_understood(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Usage.parse

    def parse(self: Usage, *args: Any, **options: Any) -> Any:
        original(self, *args, **options)
        raise UserError("all words understood")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Usage, "parse", parse)
    words = shlex.split(line, comments=True)
    assert not any("…" in word for word in words), f"{page}: it cannot be run as it stands"
    for word in words:
        assert not word.endswith(".yaml") or (ROOT / word).is_file() or "/" not in word, word
    assert main(words) == 2
    assert "all words understood" in capsys.readouterr().err


# the notebook -------------------------------------------------------------------------------------

NOTEBOOK = ROOT / "notebooks" / "own_gradients.ipynb"
CELLS = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]


def test_the_committed_outputs_are_of_one_run_without_an_error_and_have_the_picture() -> None:
    assert [cell["execution_count"] for cell in CELLS] == [*range(1, len(CELLS) + 1)]
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert NOTEBOOK.stat().st_size < 1 << 20


@pytest.mark.nightly  # by day the same lines run in README's test, on a smaller network
def test_the_notebook_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in CELLS:
        said = io.StringIO()
        lines = [line for line in cell["source"] if not line.startswith("%")]
        with contextlib.redirect_stdout(said):
            exec(compile("".join(lines), NOTEBOOK.name, "exec"), names)
        if "verdict" in cell["id"]:
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert ("1 of 1 exact" in said.getvalue()) == ("1 of 1 exact" in printed)
    assert bool(names["leak"].scores.set_index("attack").loc["patch_gradient", "exact"])
