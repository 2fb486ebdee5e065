"""Configs: YAML files of plain values, and the stock ones by their names.

read_mapping("demo")["name"], read_mapping("configs/training/cifar10.yaml"), from any folder
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mjp_privacy.core.errors import NoFile, UserError
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.registry import did_you_mean
from mjp_privacy.core.text import shown

PACKAGE = Path(__file__).resolve().parents[1]
STOCK = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
    PACKAGE / "configs",
)


def stock_config(path: str | Path) -> Path:
    """The file of this path, else the stock config that is meant by it, else the path as it is.

    stock_config("demo"), stock_config("configs/training/cifar10.yaml"): from any folder, as if it
    were the checkout; a file that is there comes first, also one in `configs/` of this folder
    """
    path = Path(path)
    is_name = not path.suffix
    if path.is_file() or path.is_absolute() or not (is_name or path.parts[0] == "configs"):
        return path
    inside = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    name = inside.with_suffix(".yaml") if is_name else inside
    found = (folder / name for folder in (Path("configs"), STOCK))
    return next((file for file in found if file.is_file()), path)


def stock_configs() -> Mapping[str, Path]:
    """Every stock config by what a command takes for it, `configs/training/cifar10.yaml`."""
    files = sorted(STOCK.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {f"configs/{file.relative_to(STOCK).as_posix()}": file for file in files}


CONFIG = FileKind("a YAML file with fields such as `name:`", "Start from one in configs/.", 1 << 18)
MOST_NODES = 50_000
"""Fields and values of a file, each counted as often as anchors repeat it."""
ODD_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-9_.]+)+)")
"""Whole numbers that begin with a zero, and numbers of base 60."""


class _Loader(yaml.SafeLoader):
    """Plain values only; `1e-3` is a number, as in YAML 1.2 and elsewhere. ValueError for what
    a few lines of anchors blow up, a field that stands twice, and numbers that mean something else
    elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes, self.sizes = 0, dict[int, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, or the one that an anchor stands for, which counts with all that it holds."""
        repeats, before = self.check_event(yaml.AliasEvent), self.nodes
        node = super().compose_node(parent, index)
        if repeats and id(node) not in self.sizes:
            raise ValueError("an anchor that holds itself")
        self.nodes += self.sizes[id(node)] if repeats else 1
        self.sizes[id(node)] = self.nodes - before
        if self.nodes > MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} fields and values, as anchors repeat them")
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Named fields, each of which stands there once."""
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in names:
                raise _fault(key, "is given twice in one mapping")
            names.add(key.value)
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        """A value, which is no number of another base."""
        node = super().compose_scalar_node(anchor)
        is_number = node.style is None and node.tag.endswith((":int", ":float"))
        if is_number and ODD_NUMBER.fullmatch(node.value):
            raise _fault(node, "is a number of another base. Write it as 10 or in quotes")
        return node


def _fault(node: yaml.ScalarNode, what: str) -> ValueError:
    return ValueError(f"line {node.start_mark.line + 1}: {shown(node.value, 60)!r} {what}")


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The top-level fields of a YAML file, or of a stock config by its path in the checkout."""
    path = stock_config(path)
    try:
        text = CONFIG.text(path)
    except NoFile as error:
        names = sorted(p.name for p in path.parent.glob("*.y*ml"))
        names += [] if path.suffix else sorted(p.stem for p in STOCK.glob("*.yaml"))
        raise UserError(
            f"No config at {shown(path)!r}: expected a YAML file, or the name of a stock config."
            f"{did_you_mean(path.name, names)} Those shipped: mjp list configs."
        ) from error
    content = yaml_value(text, shown(path))
    if not isinstance(content, Mapping):
        got = "an empty file" if content is None else type(content).__name__
        raise CONFIG.refusal(path, got)
    return content


def yaml_value(text: str, where: str) -> Any:
    """The value of a YAML text; `where` names it in messages: yaml_value("[1, 2]", "--values")."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except Exception as error:  # YAMLError, and what its constructors raise on odd values
        text = shown(" ".join(str(error).split()) or type(error).__name__)
        raise UserError(f"{where} is not valid YAML: {text}") from error
