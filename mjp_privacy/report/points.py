"""The points of two curves: PSNR against the number of uploads, and exact pictures against the
batch, as rounds.csv and batches.csv have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from mjp_privacy.metrics.statistics import PSNR_CAP, median_interval
from mjp_privacy.report.cell_columns import CLIENT_FACTS, client_text, fact, options_text, target_of
from mjp_privacy.report.lines import THRESHOLDS, Line, capped_median, exact_share, success, summary
from mjp_privacy.report.tables.figures import varying_columns

ROUND_OPTIONS = frozenset(("uploads", "rounds"))

Target = tuple[tuple[str, Any], ...]


# over uploads -------------------------------------------------------------------------------------


def curve_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each line of every attack that was run with several numbers of uploads.

    Lines share a `panel` number if run, target, attack and options are equal up to γ and the
    number of uploads. Empty where there is no such attack.
    """
    panels: dict[object, list[Line]] = {}
    for line in lines:
        if line.role == "attack" and line.count("psnr", "standard"):
            target = tuple(pair for pair in target_of(line.cell) if pair[0] != "gamma")
            attack = line.cell.attack
            panel = line.run, target, attack.known_as, attack.victim, _other_options(line)
            panels.setdefault(panel, []).append(line)
    kept = [panel for panel in panels.values() if len({line.uploads for line in panel}) > 1]
    shown = [line for panel in kept for line in panel]
    facts = [key for key in varying_columns(shown) if key not in ("uploads", "attack_options")]
    records = [
        _upload_point(line, facts) | {"panel": number}
        for number, panel in enumerate(kept, 1)
        for line in sorted(panel, key=lambda line: (line.cell.gamma, line.uploads))
    ]
    return pd.DataFrame.from_records(records)


def _other_options(line: Line) -> str:
    """The attack's options except its number of uploads, as JSON with sorted keys."""
    try:
        options = json.loads(line.cell.attack.options or "{}")
    except (TypeError, ValueError):
        return str(line.cell.attack.options)
    if not isinstance(options, dict):
        return str(options)
    others = {key: value for key, value in options.items() if key not in ROUND_OPTIONS}
    return json.dumps(others, sort_keys=True)


def _upload_point(line: Line, facts: Sequence[str]) -> dict[str, Any]:
    score = summary(line, "psnr", "standard", cap=PSNR_CAP)
    low, high = _median_interval(line)
    floor, ceiling = (
        summary(line, name, "diagnostic", cap=PSNR_CAP, interval=False).mean
        for name in ("grey_psnr", "ceiling_psnr")
    )
    return {
        **{
            "line": line.number,
            "run": line.run,
            **_model(line),
            "attack": line.cell.attack.known_as,
        },
        "options": options_text(_other_options(line)).removeprefix("–"),
        "differs": client_text(line.cell.columns, facts).removeprefix("–"),
        "gamma": float(line.cell.gamma),
        "uploads": fact(line.cell.columns, "uploads"),
        "n": score.n,
        "n_not_scored": score.counts.total - score.n,
        **{"psnr_mean": score.mean, "psnr_mean_lo": score.low, "psnr_mean_hi": score.high},
        "psnr_median": capped_median(line, "psnr", "standard"),
        **{"psnr_median_lo": low, "psnr_median_hi": high},
        "psnr_exact": summary(line, "psnr", "paper", interval=False).exact,
        **{f"psnr_from_{limit}": success(line, limit, "standard") for limit in THRESHOLDS},
        **{"grey_mean": floor, "ceiling_mean": ceiling},
    }


# over batches -------------------------------------------------------------------------------------


def batch_points(lines: Sequence[Line]) -> pd.DataFrame:
    """One row for each client, batch and number of uploads: the attack that recovers most there.

    Clients that are equal up to their batch share a `panel` number. A client of single pictures has
    no partners, so it opens the panels of fixed and of fresh ones. Empty where no client was met
    with several batches.
    """
    attacks = [
        line
        for line in lines
        if line.role == "attack"
        and line.cell.attack.victim != "april_block"
        and line.count("psnr", "standard")
    ]
    panels: dict[Target, list[Line]] = {}
    for line in attacks:
        panels.setdefault(_client(line), []).append(line)
    kept = []
    for client, members in panels.items():
        if ("batch", 1) not in client:
            kept.append([*_of_single_pictures(attacks, client), *members])
    kept = [members for members in kept if len({_batch(line) for line in members}) > 1]
    shown = [line for members in kept for line in members]
    facts = [key for key in varying_columns(shown) if key in CLIENT_FACTS and key != "batch"]
    records = [
        {"panel": number, **_batch_point(line, facts, members)}
        for number, members in enumerate(kept, 1)
        for line in _best(members)
    ]
    return pd.DataFrame.from_records(records)


def _batch(line: Line) -> int:
    return int(line.cell.client.batch or 1)


def _client(line: Line, *without: str) -> Target:
    """What is attacked, but for its batch; single pictures are said."""
    left_out = {"batch", *without}
    facts = [(key, value) for key, value in target_of(line.cell) if key not in left_out]
    facts.append(("run", line.run))
    return (("batch", 1), *facts) if _batch(line) == 1 else tuple(facts)


def _of_single_pictures(lines: Sequence[Line], panel: Target) -> list[Line]:
    """The lines of the panel's client where its batches hold one picture."""
    shared = ("partners", "mask")  # which mean nothing to a picture that is alone
    wanted = (("batch", 1), *((key, value) for key, value in panel if key not in shared))
    return [line for line in lines if _batch(line) == 1 and _client(line, *shared) == wanted]


def _best(members: Sequence[Line]) -> Iterator[Line]:
    """For each batch and number of uploads the line that recovers most."""
    places: dict[tuple[int, int], list[Line]] = {}
    for line in members:
        places.setdefault((_batch(line), int(line.uploads)), []).append(line)
    for place in sorted(places):
        yield max(
            places[place],
            key=lambda x: (exact_share(x).percent, capped_median(x, "psnr", "standard")),
        )


def _batch_point(line: Line, facts: Sequence[str], members: Sequence[Line]) -> dict[str, Any]:
    low, high = _median_interval(line)
    share = exact_share(line)
    several = next(member for member in members if _batch(member) > 1)
    return {
        **_model(line),
        "gamma": float(line.cell.gamma),
        "differs": client_text(several.cell.columns, facts).removeprefix("–"),
        "batch": _batch(line),
        "uploads": fact(line.cell.columns, "uploads"),
        **{"attack": line.cell.attack.known_as, "line": line.number},
        **{"n": share.of, "exact": share.count},
        **{"exact_lo": share.interval[0], "exact_hi": share.interval[1]},
        "psnr_median": capped_median(line, "psnr", "standard"),
        **{"psnr_median_lo": low, "psnr_median_hi": high},
        "grey_mean": summary(line, "grey_psnr", "diagnostic", interval=False).mean,
    }


# of both ------------------------------------------------------------------------------------------


def _model(line: Line) -> dict[str, Any]:
    cell = line.cell
    return {"model": cell.model.label, "setting": cell.setting, "dtype": cell.dtype}


def _median_interval(line: Line) -> tuple[float, float]:
    values = line.scored("psnr", "standard").clip(upper=PSNR_CAP)
    groups = None if line.groups is None else [line.groups[image] for image in values.index]
    return median_interval(values.to_numpy(), groups)
