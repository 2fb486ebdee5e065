"""What a study of ImageNet's size takes: core hours, GPU hours, storage, files. Nothing is run.

    python benchmarks/plan.py                        rewrites the tables of benchmarks/PLAN.md
    python benchmarks/plan.py --run results/ladder   with the unit costs of that run

Unit costs are medians over the blocks of a run and bytes of its files. Those of
UNITS were measured on one thread of an x86 server core at 192 pixels with ViT-Ti. Where they exist,
benchmarks/results/april.json and scores.json give the gradient, `april` and the scores in their
place; --run takes all that a run measured from its folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.parquet import ParquetFile

from mjp_privacy.experiment.store import RunStore
from mjp_privacy.report.rows import STAGE, cell_scores

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "PLAN.md", HERE / "results"
BEGIN, END = "<!-- plan:begin -->", "<!-- plan:end -->"

UNITS: dict[str, float] = {
    **{"decode": 0.0030, "gradient": 0.0627, "residual": 0.0586, "score": 0.0157},
    **{"attack april": 0.0052, "attack patch_gradient": 0.0039, "attack patch_prior": 0.0299},
    **{"attack masked_span": 0.1362, "attack token_span": 0.1934, "attack plain_step": 0.0086},
    **{"attack multi_round (6)": 0.1088, "attack pixel_lattice": 2.41},
    **{"scores an image": 23.03, "bytes of rows": 1002.0, "bytes of compacted rows": 163.0},
    **{"bytes of pictures": 633_575.0},
}
"""Seconds (on one core) or bytes for an image in a cell; results/ladder, ViT-Ti, 192 pixels. The
bytes of compacted rows are those of a simulated folder of 10⁸ scores (`large_store`)."""

ATTACKS = (
    *("april", "patch_gradient", "patch_prior", "masked_span", "token_span", "plain_step"),
    *("multi_round (6)", "pixel_lattice"),
)
UPLOADS_READ = 16  # by all attacks together: six read one, plain_step four, multi_round six
BLOCK = 20
SIDE = 192  # pixels of the pictures that unit costs are of
WITH_PICTURES = 100
"""Images of a cell whose pictures would be kept; the rows of all are."""

GFLOP = {"ViT-Ti": 1.3, "ViT-S": 4.6, "ViT-B": 17.6}
"""Multiplications and additions (10⁹) of one forward pass at 224 pixels, as published with DeiT."""
MODELS = {"ViT-Ti": 8, "ViT-S": 8, "ViT-B": 4}
GPU_FLOPS = 20e12
"""ASSUMED: what a data centre's GPU sustains in float32 here; no CUDA device was measured."""


@dataclass(frozen=True)
class Study:
    """How much is attacked."""

    images: int = 50_000
    ratios: int = 6

    @property
    def cells(self) -> int:
        """Model, ratio and attack."""
        return sum(MODELS.values()) * self.ratios * len(ATTACKS)

    @property
    def units(self) -> int:
        """An image in a cell."""
        return self.cells * self.images

    @property
    def uploads(self) -> int:
        """Gradients of a client: one for all attacks on one upload, one of the client whose block 0
        is altered for APRIL, five more for six uploads."""
        return 7 * sum(MODELS.values()) * self.ratios * self.images


def units_of(run: Path) -> dict[str, float]:
    """The unit costs of a finished run."""
    store = RunStore(run)
    each: defaultdict[str, list[float]] = defaultdict(list)
    images = scores = 0
    for cell in store.read_cells():
        table, rows = cell_scores(store, cell["run_id"]), store.read(cell["run_id"])
        images += len(rows)
        columns = (table.column(*key) for key in table.keys)
        scores += sum(len(column.at) for column in columns if column is not None)
        for name in (name for name in rows if name.startswith(STAGE)):
            stage = name.removeprefix(STAGE)
            key = f"attack {cell['attack']}" if stage == "attack" else stage
            each[key] += rows.groupby("block")[name].mean().dropna().tolist()
    found = {name: statistics.median(seconds) for name, seconds in each.items()}
    pictures = _picture_bytes(run)
    whole = sum(path.stat().st_size for path in run.glob("rows/*/*.parquet"))
    found |= {"bytes of rows": (whole - pictures) / images} if whole else {}
    found |= {"bytes of pictures": pictures / images} if pictures else {}
    return found | {"scores an image": scores / images}


def _picture_bytes(run: Path) -> int:
    """The bytes of all columns of pictures: those whose metadata say their shape."""
    count = 0
    for path in run.glob("rows/*/*.parquet"):
        file = ParquetFile(path)
        pictures = {f.name for f in file.schema_arrow if b"shape" in (f.metadata or {})}
        for group in map(file.metadata.row_group, range(file.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            count += sum(c.total_compressed_size for c in chunks if c.path_in_schema in pictures)
    return count


def benchmark_units(results: Path) -> dict[str, float]:
    """CPU seconds an image of the stages that `april` and `scores` measured, ViT-Ti at 192 pixels;
    a file that is not there, or is of other pictures, gives nothing."""
    found = {}
    for row in _content(results / "april.json").get("rows", []):
        if (row["model"], row["dtype"]) == ("ViT-Ti/16 @192", "float32"):
            name = "gradient" if row["stage"] == "gradient" else "attack april"
            found[name] = row["seconds_per_image"]["ours"]["cpu"]["median"]
    scores = _content(results / "scores.json")
    if scores.get("side") == SIDE:
        ways = {row["way"]: row["seconds_per_image"]["median"] for row in scores["rows"]}
        found["score"] = ways["prepared"]
    return found


def _content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content


def tables(study: Study, units: Mapping[str, float]) -> Iterator[str]:
    """The tables of the page, in Markdown."""
    yield _table(("Unit", "each"), [(name, _short(cost, name)) for name, cost in units.items()])
    yield _table(("Stage", "times", "s each", "core hours"), [*_time_rows(study, units)])
    yield _table(("Stored", "bytes", "files"), [*_storage_rows(study, units)])
    yield _table(
        ("Model", "uploads", "FLOP each", "GPU hours (ASSUMED 20 TFLOP/s)"), [*_gpu(study)]
    )


def _short(cost: float, name: str) -> str:
    return (
        f"{cost:,.0f} B" if "bytes" in name else f"{cost:.4g}" + ("" if "scores" in name else " s")
    )


def _time_rows(study: Study, units: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    """Core hours by stage. Models of other sizes: gradients by FLOP, the rest as for ViT-Ti."""
    share = sum(MODELS[m] * GFLOP[m] for m in MODELS) / sum(MODELS.values()) / GFLOP["ViT-Ti"]
    pixels = (224 / 192) ** 2
    targets = study.units // len(ATTACKS)
    stages = [
        ("decode", study.images * sum(MODELS.values()), units["decode"] * pixels),
        ("gradient (mean of the models)", study.uploads, units["gradient"] * pixels * share),
        *((name, targets, units[f"attack {name}"] * pixels) for name in ATTACKS),
        (
            "gradient residual, of every upload an attack reads",
            targets * UPLOADS_READ,
            units["residual"] * pixels * share,
        ),
        ("score, five metrics twice", study.units, units["score"] * pixels),
    ]
    for name, times, each in stages:
        yield name, f"{times:,}", f"{each:.4f}", f"{times * each / 3600:,.0f}"
    total = sum(times * each for _, times, each in stages) / 3600
    yield "**all**", "", "", f"**{total:,.0f}**"


def _storage_rows(study: Study, units: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    blocks = study.cells * -(-study.images // BLOCK)
    rows = study.units * units["scores an image"]
    picture = units["bytes of pictures"] * (224 / 192) ** 2
    few = study.cells * WITH_PICTURES
    yield (
        f"{rows / 1e9:.2f}·10⁹ scores, as blocks",
        _bytes(study.units * units["bytes of rows"]),
        (f"{blocks:,}"),
    )
    yield (
        "the same, compacted",
        _bytes(study.units * units["bytes of compacted rows"]),
        f"{study.cells:,}",
    )
    yield "pictures of all images", _bytes(study.units * picture), f"{blocks:,}"
    yield f"pictures of {WITH_PICTURES} images a cell", _bytes(few * picture), f"{few // BLOCK:,}"


def _gpu(study: Study) -> Iterator[tuple[str, ...]]:
    of_a_model = study.uploads // sum(MODELS.values())
    for model, count in MODELS.items():
        flop = 2 * 3 * GFLOP[model] * 1e9  # forward and twice that backward
        hours = of_a_model * count * flop / GPU_FLOPS / 3600
        yield f"{count} × {model}", f"{of_a_model * count:,}", f"{flop:.2g}", f"{hours:,.1f}"


def _bytes(number: float) -> str:
    for unit in ("kB", "MB", "GB", "TB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number:.3g} PB"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Rewrite the tables of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, help="a finished run whose unit costs are taken")
    given = parser.parse_args()
    units = UNITS | benchmark_units(RESULTS)
    units |= units_of(given.run) if given.run else {}
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    made = "\n\n".join(tables(Study(), units))
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
