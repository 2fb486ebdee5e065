"""Write the card beside each model of the package: python -m tools.model_cards.

What it is comes from the weights' own metadata and the registry of names, how good it is from
results/zoo: nothing in a card is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from safetensors import safe_open

from mjp_privacy.models.zoo import NAMED_MODELS

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "mjp_privacy" / "assets" / "zoo"
RESULTS = ROOT / "results" / "zoo"
TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def cards() -> dict[Path, str]:
    """The text of every card, by its file."""
    source = TEMPLATE.read_text(encoding="utf-8")
    template = jinja2.Template(source, undefined=jinja2.StrictUndefined)
    tables = [pd.read_csv(RESULTS / name) for name in ("summary.csv", "patch14.csv")]
    measured = pd.concat(tables).set_index("model")
    found = {}
    for file in sorted(ZOO.glob("*.safetensors")):
        facts, parameters = stored(file)
        row = measured.loc[file.stem.removeprefix("cifar_")]
        facts |= {"name": file.stem, "summary": NAMED_MODELS[file.stem].summary}
        facts |= {"row": row, "share": lambda name, row=row: share(row, name)}
        text = template.render(facts, m=facts["recipe"]["model"], parameters=parameters)
        found[file.with_suffix(".md")] = text + "\n"
    return found


def stored(file: Path) -> tuple[dict[str, Any], int]:
    """The metadata of a weights file, and how many numbers it holds."""
    with safe_open(file, framework="np") as weights:
        values = {k: v for k, v in weights.metadata().items() if not k.startswith("mjp-")}
        numbers = sum(weights.get_tensor(key).size for key in weights.keys())
    return {key: json.loads(value) for key, value in values.items()}, numbers


def share(row: pd.Series[Any], name: str) -> str:
    """A percentage and its interval."""
    return f"{row[name]:.1f} [{row[f'{name}_low']:.1f}, {row[f'{name}_high']:.1f}]"


if __name__ == "__main__":
    for file, text in cards().items():
        file.write_text(text, encoding="utf-8")
