"""Tries every network of timm's that embeds patches: which load, which leak, which are refused.

    python -m tools.timm_families --out results/atlas          # names.csv, families.csv: 15 min
    python -m tools.timm_families --names "*dinov3*" --out /tmp/some
    python -m tools.timm_families --figure --out results/atlas

For each name, with random weights and no download: an outline of the network as `mjp check --model`
makes it; then timm's own network of two blocks (of all where it takes no depth) for pictures of
4 × 4 patches, one 8-bit picture, the gradients of a plain loop in float32, and `attack_gradients`.

    mechanism   table: ∂L/∂pos_embed sends a row for each patch; none: the network has no table, and
                `patch_lattice` applies up to 80 patches; refused: `why` says what was expected
    forward, gradient   how far outputs and gradients of the copy are from timm's own, relatively,
                in float64, in which rounding hides no difference
    psnr        of patch_gradient's picture, in dB, 100 at most; exact: equal in all 8-bit values

`--figure` draws atlas.png from the published rows of the folder: which share of the pictures each
network gives away exactly, a dot a network and client, of the attack that gives most.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mjp_privacy import attack_gradients
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.client.upload import make_upload
from mjp_privacy.core.drawing import picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import ClientInput
from mjp_privacy.metrics.statistics import PSNR_CAP
from mjp_privacy.models.live.modules import load_module
from mjp_privacy.models.loading import outline_model
from mjp_privacy.models.timm_networks import LAYER_SCALE, SCALES
from tools.published_rows import Line, read

FAMILIES = (
    *("vision_transformer", "deit", "eva", "beit", "cait", "convit", "vision_transformer_relpos"),
    *("vision_transformer_sam", "deepseek_vit", "qwen3_vit", "gemma4_vit", "naflexvit"),
    *("swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "nest", "volo", "xcit"),
    *("vision_transformer_hybrid", "vitamin", "crossvit", "tnt", "twins", "levit", "pit", "coat"),
    *("mvitv2", "hiera", "hieradet_sam2", "tiny_vit", "efficientvit_mit", "visformer"),
    *("mlp_mixer",),
)
"""timm's files with a Transformer or patches in them; the others are convolutional networks."""
GRID, CLASSES, DEPTH = 4, 10, 2
LABEL = torch.tensor([3])
LARGEST = 600e6  # parameters of a network that is built; larger ones are tried as an outline alone


def names_of(pattern: str) -> Iterator[tuple[str, str]]:
    """Each name that fits, after its family."""
    import timm
    from timm.models._registry import _model_to_module

    for name in timm.list_models(pattern or None):
        if _model_to_module[name] in FAMILIES:
            yield _model_to_module[name], name


def tried(name: str) -> dict[str, Any]:
    """What is known of one name."""
    try:
        outline = outline_model(name, checkpoint="random")
    except UserError as error:
        return {"mechanism": "refused", "why": str(error)}
    facts = {
        "mechanism": "none" if outline.pos_embed is None else "table",
        "patches": outline.grid.patches,
        "width": outline.embed_dim,
        "patch": outline.patch_size,
        "up_to": math.isqrt(outline.embed_dim) * outline.patch_size,
    }
    torch.manual_seed(0)
    net = built(name, GRID * outline.patch_size)
    if net is None or outline.pos_embed is None:
        return facts
    try:
        return facts | attacked(net)
    except UserError as error:
        return {**facts, "mechanism": "refused", "why": str(error)}


def built(name: str, side: int) -> nn.Module | None:
    """timm's network, short and for small pictures if it takes that; None where it is too large."""
    import timm

    for options in ({"img_size": side, "depth": DEPTH}, {"img_size": side}, {}):
        try:
            with torch.device("meta"):
                outline = timm.create_model(name, num_classes=CLASSES, **options)
        except Exception:  # each of timm's classes has its own limits
            continue
        if sum(p.numel() for p in outline.parameters()) > LARGEST:
            return None
        net = timm.create_model(name, num_classes=CLASSES, **options).eval()
        with torch.no_grad():
            for key, parameter in net.named_parameters():
                if key.endswith(SCALES):
                    parameter.fill_(LAYER_SCALE)
        return net  # type: ignore[no-any-return]
    return None


def attacked(net: nn.Module) -> dict[str, float]:
    """How near the copy is to timm's own network, and what patch_gradient finds."""
    side = load_module(net, mean=0.5, std=0.5).card.img_size
    picture = (torch.rand(1, 3, side, side) * 255).round() / 255
    plain_step(net, picture / 0.5 - 1)
    leak = attack_gradients(net, mean=0.5, std=0.5, images=picture, attacks=["patch_gradient"])
    found = leak["patch_gradient"].images[0]
    exact = bool(((found * 255).round() == (picture[0] * 255).round()).all())
    score = min(float(leak["patch_gradient"].psnr), PSNR_CAP)
    return {**difference(net.double(), picture.double()), "psnr": score, "exact": exact}


def difference(net: nn.Module, picture: Tensor) -> dict[str, float]:
    """How far output and gradients of the copy are from the network's own, relatively."""
    copy = load_module(net, mean=0.5, std=0.5).double()
    logits = plain_step(net, copy.normalize(picture))
    own = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    sent = make_upload(copy, [ClientInput(picture, LABEL, ["a"])], ClientConfig()).grads
    length = float(torch.stack([g.square().sum() for g in own.values()]).sum().sqrt())
    off = torch.stack([(sent[name][0] - g).norm() for name, g in own.items() if name in sent])
    with torch.no_grad():
        forward = float((copy(copy.normalize(picture)) - logits).norm() / logits.norm())
    return {"forward": forward, "gradient": float(off.norm()) / length}


def plain_step(net: nn.Module, fed: Tensor) -> Tensor:
    """The client's step as anybody writes it; what the network answers."""
    net.zero_grad()
    logits: Tensor = net(fed)
    cross_entropy(logits, LABEL).backward()  # type: ignore[no-untyped-call]
    return logits.detach()


def by_family(names: pd.DataFrame) -> pd.DataFrame:
    """A row a family; `why` is its first refusal without the class that it is about and without
    what to do."""
    rows = []
    for family, own in names.groupby("family", sort=False):
        counts, tried_out = own["mechanism"].value_counts(), own[own["psnr"].notna()]
        why = own.loc[own["mechanism"] == "refused", "why"].head(1)
        rows.append(
            {
                **{"family": family, "example": own["name"].iloc[0], "names": len(own)},
                **{"with a table": counts.get("table", 0), "without": counts.get("none", 0)},
                **{"refused": counts.get("refused", 0), "attacked": len(tried_out)},
                "exact": int(tried_out["exact"].astype(bool).sum()),
                "least psnr": tried_out["psnr"].min() if len(tried_out) else None,
                "N ≤ D": int((own["patches"] <= own["width"]).sum()),
                "why": "".join(why).partition(": ")[2].partition(". ")[0],
            }
        )
    return pd.DataFrame(rows)


# the figure of published rows ---------------------------------------------------------------------

FILES = ("rows.parquet", "no_table.parquet", "batches.parquet")
FLOOR = "grey"
COLOURS = {
    "a table of positions, one picture": "#0072b2",
    "a batch": "#56b4e9",
    "MJP client": "#d55e00",
    "no gradient of a table": "#009e73",
}


def kind_of(line: Line) -> str:
    """Which of COLOURS a line is of."""
    if line.facts["setting"] == "c":
        return "MJP client"
    if line.facts["batch"] > 1:
        return "a batch"
    needs_no_table = line.facts["attack"] in ("patch_lattice", "token_peeling")
    return "no gradient of a table" if needs_no_table else "a table of positions, one picture"


def best_lines(folder: Path) -> list[Line]:
    """For each network, setting and batch the line of most exact pictures, by kind."""
    best: dict[tuple[str, str, float], Line] = {}
    for line in [line for name in FILES for line in read(folder / name).lines]:
        facts = line.facts
        if facts["attack"] == FLOOR or facts["role"] != "attack":
            continue
        key = facts["model"], facts["setting"], facts["batch"]
        if key not in best or line.share("exact").percent > best[key].share("exact").percent:
            best[key] = line
    return sorted(best.values(), key=lambda line: list(COLOURS).index(kind_of(line)))


def draw(folder: Path) -> None:
    """A dot a network and client with Wilson's 95 % interval."""
    lines = best_lines(folder)
    with picture(folder / "atlas.png", 9, 1.2 + 0.22 * len(lines)) as figure:
        axes = figure.subplots()
        named, names = set[str](), list[str]()
        for place, line in enumerate(lines):
            share, kind = line.share("exact"), kind_of(line)
            axes.plot(share.interval, [place, place], color=COLOURS[kind], alpha=0.5, linewidth=2)
            label = None if kind in named else kind
            axes.plot([share.percent], [place], "o", color=COLOURS[kind], label=label)
            named.add(kind)
            facts = line.facts
            batch = f", B = {facts['batch']:.0f}" if facts["batch"] > 1 else ""
            names.append(f"{facts['model']}{batch}: {facts['attack']}")
        axes.set_yticks(range(len(lines)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(-2, 102)
        axes.set_xlabel("pictures that are equal in every 8-bit value, % (95 % interval)")
        axes.grid(axis="x", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", default="", help="a pattern; all families by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", action="store_true", help="draw atlas.png of OUT, nothing else")
    arguments = parser.parse_args(argv)
    if arguments.figure:
        draw(arguments.out)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Mapping[str, Any]] = []
    for family, name in names_of(arguments.names):
        rows.append({"family": family, "name": name, **tried(name)})
        print(f"{len(rows)}: {name}: {rows[-1]}", file=sys.stderr, flush=True)
    columns = (
        *("family", "name", "mechanism", "patches", "width", "patch", "up_to"),
        *("forward", "gradient", "psnr", "exact", "why"),
    )
    names = pd.DataFrame(rows).reindex(columns=list(columns))
    names.to_csv(arguments.out / "names.csv", index=False)
    by_family(names).to_csv(arguments.out / "families.csv", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
