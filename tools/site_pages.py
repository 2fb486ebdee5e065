"""The pages of the documentation site: a hook of mkdocs that takes them from where they stand.

Every page keeps its path in the repository, so that its links to other pages hold on the site too.
A link to any other file of the repository brings that file along; one to a folder becomes text; one
to a page that mkdocs.yml does not name is an error.
Two pages exist on the site alone, and are made of docstrings: the attacks and the public names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

import mjp_privacy
from attacks import ATTACKS, CONTROLS
from mjp_privacy.core.registry import Entry

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that mkdocs.yml names, and the files that they link to."""
    made = {"docs/api.md": public_names(), "docs/attack_classes.md": attack_classes()}
    pages = list(page_paths(config.nav))
    for page in pages:
        if page in made:
            files.append(File.generated(config, page, content=made[page]))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    linked = {path for page in pages if page not in made for path in linked_files(page)}
    for path in sorted(linked - set(pages)):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def page_paths(entries: Any) -> list[str]:
    """Paths of all pages of a navigation: lists of {title: page or further list}."""
    if isinstance(entries, str):
        return [entries]
    if isinstance(entries, dict):
        entries = list(entries.values())
    return [path for entry in entries for path in page_paths(entry)]


def linked_files(page: str) -> set[str]:
    """Files of the repository, other than pages, that a page links to."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = {(ROOT / page).parent / match[3] for match in LINK.finditer(text)}
    inside = {target.resolve() for target in targets if target.is_file()}
    return {path.relative_to(ROOT).as_posix() for path in inside if path.suffix != ".md"}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text of a page; a link to a folder is its words."""
    here = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda found: found[2 if (here / found[3]).is_dir() else 0], markdown)


class Docstrings(griffe.Extension):
    """Examples and lists of arguments in docstrings keep their lines on the site."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the paragraphs of a docstring that are code, equations or columns."""
        if obj.docstring:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(fenced, paragraphs))


def fenced(paragraph: str) -> str:
    """A paragraph as Markdown: in a fence if it is Python, or if its columns are set by spaces."""
    try:
        body = ast.parse(paragraph).body
    except SyntaxError:
        body = []
    if any(isinstance(node, ast.Assign | ast.ImportFrom) for node in body):
        return f"```python\n{paragraph}\n```"
    if re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE):
        return f"```text\n{paragraph}\n```"
    return paragraph


def public_names() -> str:
    """The page of what `import mjp_privacy` offers, from signatures and docstrings."""
    names = [name for name in mjp_privacy.__all__ if not name.startswith("_")]
    lines = ["# Python interface", "", "`from mjp_privacy import …`", ""]
    for name in names:
        lines += [f"::: {getattr(mjp_privacy, name).__module__}.{name}", ""]
    lines += ["## What crosses borders", ""]
    for name in ("AttackerView", "ClientUpdate", "Reconstruction", "Attack", "Control"):
        lines += [f"::: mjp_privacy.interfaces.{name}", ""]
    return "\n".join(lines)


def attack_classes() -> str:
    """The page of all attacks and controls: for each file what it says of its mathematics, then its
    attacks with their options."""
    by_file: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in (*ATTACKS.items(), *CONTROLS.items()):
        by_file.setdefault(entry.where.partition(":")[0], []).append((name, entry))
    lines = ["# Attacks, from their docstrings", ""]
    for module, entries in by_file.items():
        lines += [f"## {module.rpartition('.')[2].replace('_', ' ')}", "", *docstring(module)]
        for name, entry in entries:
            lines += [f"### `{name}`", "", f"*{entry.summary}*", ""]
            lines += docstring(entry.where.replace(":", "."))
    return "\n".join(lines)


def docstring(name: str) -> list[str]:
    """What stands on a page for the docstring of a module or class, without its name."""
    options = "{show_root_toc_entry: false, show_root_heading: false, show_bases: false}"
    return [f"::: {name}", f"    options: {options}", ""]
