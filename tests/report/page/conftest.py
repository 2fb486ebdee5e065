"""A made-up run whose page has every part, and its report, written once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.write import write_report
from tests.helpers.ladder_rows import simple_line
from tests.helpers.report_rows import (
    add_pictures,
    cell,
    image_id,
    intact,
    photograph,
    shuffled,
    write_pictures,
)

MJP: dict[str, Any] = {"setting": "c", "gamma": 0.27}
PSNR: dict[str, list[float | str]] = {
    "april": [9.0, 8.5, 7.25, 4.0],
    "pixel_lattice": [math.inf, 24.5, 100.5, 21.0],
    "multi_round": [math.inf, 101.0, 102.0, 98.0],
    "grey": [12.5, 11.0, 13.0, 10.0],
    "masked_span": ["failed"] * 4,
    "double": [math.inf, 26.0, 101.0, 20.0],
    "plain": [math.inf, 103.0, 101.0, 102.0],
}
"""By line, in the order of their numbers: PSNR of each of four images."""


def page_run(folder: Path, **changes: Any) -> Path:
    """Attacks on an MJP client, a control, a failed line, a float64 twin and a plain client."""
    store = RunStore(folder)
    cells = {
        "april": cell("april", **MJP),
        "pixel_lattice": intact("pixel_lattice", **MJP),
        "multi_round": intact("multi_round", uploads=6, **MJP),
        "grey": intact("grey", role="floor", **MJP),
        "masked_span": intact("masked_span", **MJP),
        "double": intact("double", attack="pixel_lattice", dtype="float64", **MJP),
        "plain": intact("plain", attack="patch_gradient"),
    }
    store.write_cells([entry | changes for entry in cells.values()])
    for name, entry in cells.items():
        known = {} if name == "grey" else {"zero_rows": 50.0 * bool(entry["gamma"])}
        simple_line(store, entry | changes, PSNR[name], **known)
        if name not in ("grey", "masked_span"):
            psnr = {image_id(i): float(value) for i, value in enumerate(PSNR[name])}
            write_pictures(store, entry | changes, psnr)
    masks = torch.arange(16).expand(4, 16) % 4 == 0
    made = torch.stack([photograph(i) for i in range(4)])
    fed = torch.stack([shuffled(image) for image in made])
    tensors = {"images": made * 0.9, "plain": made, "input": fed, "target": made, "mask": masks}
    add_pictures(store, "april", tensors, [image_id(i) for i in range(4)])
    return folder


@pytest.fixture(scope="session")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the report; RUN lies beside it."""
    root = tmp_path_factory.mktemp("page")
    write_report([page_run(root / "run")], root / "out")
    return root / "out"
