"""Results and their tables: a benchmark's JSON in benchmarks/results, its table in README.md.

    python -m benchmarks.page            writes every table again (make bench ends with it)

A table stands between `<!-- table: NAME begin -->` and `<!-- table: NAME end -->`; one whose file
is not there is left as it is. tests/test_benchmarks.py holds the page and the files together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
Row = Sequence[str]


def main() -> None:
    """Write every table whose results are there."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def write_result(
    name: str, content: Mapping[str, Any], machine: Mapping[str, Any], table: str = ""
) -> None:
    """Write benchmarks/results/NAME.json and print its table; machine: facts from before the runs.

    table: the name of the table that shows it, where it is another one
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n")
    print(markdown(list(TABLES[table or name](content))), path, sep="\n")


def with_tables(text: str) -> str:
    """The page's text with its tables made again."""
    for name, make in TABLES.items():
        file = RESULTS / f"{name}.json"
        if not file.is_file():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        begin, end = f"<!-- table: {name} begin -->", f"<!-- table: {name} end -->"
        table = f"{begin}\n{markdown(list(make(content)))}\n\n{machine_line(content)}\n{end}"
        text = re.sub(f"{begin}.*?{end}", lambda _, table=table: table, text, flags=re.DOTALL)
    return text


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; the first row is its head, the first column stands left."""
    head, *body = rows
    lines = ["| " + " | ".join(row) + " |" for row in (head, *body)]
    return "\n".join([lines[0], "|---" + "|---:" * (len(head) - 1) + "|", *lines[1:]])


def machine_line(content: Mapping[str, Any]) -> str:
    """The machine in a line below its table."""
    facts = content["machine"]
    where = facts["gpu"] or f"{facts['processor']}, {facts['cores']} cores"
    return f"{where}; {facts['threads']} thread(s), torch {facts['torch']}."


def of_stages(content: Mapping[str, Any]) -> Iterator[Row]:
    """The gradient and the closed form beside breaching's loop; the file has float64 too."""
    yield (
        "",
        "breaching's loop, ms",
        "plain batch, ms",
        "ours, ms",
        "loop / ours",
        "ours / plain batch",
    )
    for row in _of_float32(content):
        seconds, ratios = row["seconds_per_image"], row["ratios"]
        plain = ratios.get("plain / ours")
        yield (
            f"{row['model']}, {row['dtype']}, {row['stage']}",
            _milliseconds(seconds["loop"]),
            _milliseconds(seconds["plain"]) if plain else "",
            _milliseconds(seconds["ours"]),
            _ratio(ratios["loop / ours"]["wall"]),
            f"{1 / plain['wall']['median']:.2f}" if plain else "",
        )


def of_pipeline(content: Mapping[str, Any]) -> Iterator[Row]:
    """Images in, rows stored; the file has float64 too."""
    stages = ("gradient", "attack", "score")
    ours = (f"of it {stage}" for stage in stages)
    yield ("ms an image", "loop and scripts", "ours", "ratio", *ours)
    for row in _of_float32(content):
        seconds = row["seconds_per_image"]
        yield (
            row["dtype"],
            _milliseconds(seconds["scripts"]),
            _milliseconds(seconds["ours"]),
            _ratio(row["scripts / ours"]["wall"]),
            *(f"{1e3 * row['ours_last_by_stage'][stage]:.1f}" for stage in stages),
        )


def of_scores(content: Mapping[str, Any]) -> Iterator[Row]:
    """The five metrics in both variants, for one image in one cell."""
    names = {
        "packages": "the packages, image by image",
        "images": "ours, two sets of images",
        "prepared": "ours, what is known of the private images prepared",
    }
    yield (f"{content['side']} px, one thread", "CPU ms an image and cell", "packages / this")
    for row in content["rows"]:
        seconds = row["seconds_per_image"]["median"]
        yield (names[row["way"]], f"{1e3 * seconds:.1f}", _ratio(row["packages / this"]))


def of_start(content: Mapping[str, Any]) -> Iterator[Row]:
    """Commands from their start to their end."""
    yield ("", "seconds", "modules")
    starts = dict(content["starts"])
    helped = [starts.pop(name) for name in [*starts] if re.fullmatch(r"mjp [\w-]+ --help", name)]
    for name, times in starts.items():
        yield (f"`{name}`", f"{times['wall_median']:.2f}", f"{times['modules']:,.0f}")
    walls, modules = (sorted(times[key] for times in helped) for key in ("wall_median", "modules"))
    spans = f"{walls[0]:.2f}–{walls[-1]:.2f}", f"{modules[0]:,.0f}–{modules[-1]:,.0f}"
    yield (f"`mjp COMMAND --help`, {len(helped)} commands", *spans)


def of_lattice(content: Mapping[str, Any]) -> Iterator[Row]:
    """Stages of `pixel_lattice`."""
    found = f"{content['exact']} of {content['pictures']} pictures whole"
    yield (f"γ {content['gamma']:g}, {content['side']} px, {found}", "CPU s an image", "range")
    for stage, seconds in content["seconds_per_image"].items():
        spread = f"{seconds['min']:.2f} to {seconds['max']:.2f}"
        yield (stage, f"{seconds['median']:.2f}", spread)


def of_workers(content: Mapping[str, Any]) -> Iterator[Row]:
    """One process and several workers."""
    yield ("", "seconds", "beside 2 workers")
    for name, seconds in content["seconds"].items():
        ratio = content["ratios"].get(f"{name} / 2 workers")
        spread = f"{seconds['median']:.1f} ({seconds['min']:.1f} to {seconds['max']:.1f})"
        yield (name, spread, _ratio(ratio) if ratio else "")


def of_growth(content: Mapping[str, Any]) -> Iterator[Row]:
    """Exponents of an attack's time; the file has those of the gradient and of memory too."""
    yield ("grows", "attack", "values", "attack, ms")
    for curve in content["curves"]:
        ends = curve["measured"][0], curve["measured"][-1]
        values = f"{curve['values'][0]:g}–{curve['values'][-1]:g}"
        yield (curve["axis"], curve["attack"], values, _grown(curve, ends))


def _grown(curve: Mapping[str, Any], ends: Sequence[Mapping[str, float]]) -> str:
    """ "12–95, 1.02±0.03": milliseconds of the attack, and the exponent."""
    k, error = curve["exponents"]["attack"]
    first, last = (1e3 * end["attack"] for end in ends)
    return f"{first:.3g}–{last:.3g}, {k:.2f}±{error:.2f}"


def _of_float32(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in content["rows"] if row["dtype"] == "float32"]


def _milliseconds(timing: Mapping[str, Any]) -> str:
    return f"{1e3 * timing['wall']['median']:.1f}"


def _ratio(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


TABLES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Row]]] = {
    "april": of_stages,
    "pipeline": of_pipeline,
    "scores": of_scores,
    "lattice": of_lattice,
    "start": of_start,
    "ladder_workers": of_workers,
    "growth": of_growth,
}


if __name__ == "__main__":
    main()
