"""A made-up run of a plain and a masking client with every kind of figure, and cards."""

import json
import math
from pathlib import Path
from typing import Any

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.answer import build_card
from mjp_privacy.report.card import Card, CardFigure, CardRow
from mjp_privacy.report.clients import clients_of
from mjp_privacy.report.runs import load_runs
from tests.helpers.report_rows import cell, image_row, intact, run_of, write_rows

VIT = {"model": "ViT-Ti", "architecture": "vit_tiny_patch16_224", "size": 192}
MJP = {**VIT, "model": "ViT-Ti+MJP", "setting": "c", "gamma": 0.27}
PSNR = {
    "april": (17.0, 21.5, "failed", 9.25, 14.0),
    "patch_gradient": (57.0, math.inf, 12.0, math.inf, 33.5),
    "april_mjp": (9.0, 8.5, 8.0, "unsupported", 40.0),
    "masked_span": (16.0, 22.0, 15.5, "failed", 30.25),
    "pixel_lattice": (math.inf, 18.0, "unsupported", "failed", 33.0),
    "multi_round_2": (18.0, 26.0, 15.0, 31.0, math.inf),
    "multi_round_4": (25.0, 41.0, 14.5, 38.0, math.inf),
    "grey": (11.0, 10.5, 12.25, 9.5, 10.0),
}
"""Five images by cell: three photographs, of which the last two were cut in two. The best of one is
that of an attack on an altered client."""
PHOTOGRAPHS = ("a", "b", "b", "c", "c")


def card_run(folder: Path) -> Path:
    """Write the run."""
    store = RunStore(folder)
    entries = {
        "april": cell("april", **VIT, paper_row={"model": "ViT-S", "setting": "a"}),
        "patch_gradient": intact("patch_gradient", **VIT),
        "april_mjp": cell("april_mjp", **MJP, paper_row={"model": "DeiT-S+MJP", "setting": "c"}),
        "masked_span": intact("masked_span", **MJP),
        "pixel_lattice": intact("pixel_lattice", **MJP),
        **{name: intact(name, **MJP, attack_name="multi_round") for name in PSNR if "_r" in name},
        "grey": intact("grey", **MJP, role="floor"),
    }
    for name, entry in entries.items():
        if "_r" in name:
            uploads = int(name[-1])
            options = json.dumps({"uploads": uploads})
            entry |= {"attack": "multi_round", "uploads": uploads, "attack_options": options}
        rows = []
        for at, psnr in enumerate(PSNR[name]):
            residual = 0.4 - at / 10 if name == "pixel_lattice" else 1 / (at + 2)
            known = {"grey_psnr": float(PSNR["grey"][at]), "gradient_residual": residual}
            known |= {"cond_a": 1e3} | ({"zero_rows": 9.0} if entry["gamma"] else {})
            scores = {"ssim": 0.2} if name == "pixel_lattice" else {}
            row = image_row(
                *(f"{at}.png", psnr),
                reason=f"{name} says so",
                group=PHOTOGRAPHS[at],
                diagnostics=known,
                top1={"intact": float(at > 0), "altered": float(at > 1)},
                **scores,
            )
            rows.append(row)
        write_rows(store, entry, rows)
    store.write_cells([entry | {"planned_images": 5} for entry in entries.values()])
    return folder


def card_of(folder: Path) -> Card:
    """The card that a report of this run has."""
    return build_card(clients_of(load_runs([folder]).lines))


def card_of_lines(folder: Path, *lines: tuple[Any, ...]) -> Card:
    """The card of a run of these lines: cell, PSNR or status by image, diagnostics of all."""
    return card_of(run_of(folder, *lines))


def keys(flagged: CardFigure | CardRow | None) -> str:
    """The keys of the flags, in the order of the alphabet: `below_floor unfinished`."""
    assert flagged is not None
    return " ".join(sorted(flag.key for flag in flagged.flags))
