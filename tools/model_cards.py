"""Write the card of the models of the package: python -m tools.model_cards.

What it is comes from the weights' own metadata and the registry of names, how good it is from
results/zoo: no figure in it is written by hand.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from safetensors import safe_open

from mjp_privacy.models.zoo import NAMED_MODELS

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT / "mjp_privacy" / "assets" / "zoo"
RESULTS = ROOT / "results" / "zoo"
CARD = ZOO / "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def card() -> str:
    """The text of the card."""
    template = jinja2.Template(TEMPLATE.read_text("utf-8"), undefined=jinja2.StrictUndefined)
    tables = [pd.read_csv(RESULTS / name) for name in ("summary.csv", "patch14.csv")]
    measured = pd.concat(tables).set_index("model")
    (gamma,) = measured["gamma"].unique()
    models = []
    order = list(NAMED_MODELS)
    for file in sorted(ZOO.glob("*.safetensors"), key=lambda file: order.index(file.stem)):
        facts, parameters = stored(file)
        row = measured.loc[file.stem.removeprefix("cifar_")]
        facts |= {"name": file.stem, "summary": NAMED_MODELS[file.stem].summary}
        facts |= {"share": partial(share, row), "m": facts["recipe"]["model"]}
        models.append(facts | {"parameters": parameters})
    return template.render(models=models, gamma=gamma) + "\n"


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
    CARD.write_text(card(), encoding="utf-8")
