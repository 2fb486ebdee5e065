"""A made-up page: known figures, public photographs, hostile names, uploads without truth."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import skimage.data
from PIL import Image, ImageFilter

from mjp_privacy.report.card import Card, CardFigure, CardRow
from mjp_privacy.report.charts.chart import Chart
from mjp_privacy.report.notes import Flag, Section
from mjp_privacy.report.page.content import PageContent, PageLine, PagePicture
from mjp_privacy.report.tables.text import TextTable

HOSTILE = "</script><img src=x onerror=\"alert('x')\"><b>&amp; ]]> \u2028 ${7*7} {{7*7}}"
"""A name that is markup, a script's end, a template and a line break of JavaScript."""

NAMES = ("astronaut", "chelsea", "coffee", "rocket")
SIZE = 96
SIDE = 6  # patches along an edge
SCORES = ("psnr", "ssim", "lpips", "mse", "fft2d")
BELOW = Flag("below_floor", "below the floor", "The attack failed.")
EIGHT_BIT = Flag("assumes_8_bit", "8-bit assumption", "Pixels are multiples of 1/255.")


def line(number: int, attack: str, psnr: Sequence[float], **changes: object) -> PageLine:
    """One line whose figures follow from the PSNR of each picture."""
    known = np.minimum(np.asarray([value for value in psnr if not math.isnan(value)]), 100)
    mean = float(known.mean()) if known.size else math.nan
    low, high = (mean - 1.25, min(mean + 1.5, 100)) if known.size > 1 else (math.nan, math.nan)
    scores = {"psnr": (mean, low, high), "ssim": (mean / 100, low / 100, high / 100)}
    scores |= {"lpips": (1 - mean / 100, 1 - high / 100, 1 - low / 100)}
    scores |= {"mse": (10 ** (-mean / 10), 0.0, 0.2), "fft2d": (0.0059, 0.004, 0.007)}
    made = PageLine(
        number=number,
        run="runs/ladder",
        model="ViT-Ti+MJP",
        client="MJP γ .27",
        setting="c",
        gamma=0.27,
        dtype="float32",
        attack=attack,
        role="attack",
        uploads=1,
        n=int(known.size),
        not_scored=len(psnr) - int(known.size),
        exact=int((known >= 60).sum()),
        above_20=int((known >= 20).sum()),
        of=len(psnr),
        scores=scores,
        median_psnr=float(np.median(known)) if known.size else math.nan,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


PSNR: dict[int, tuple[float, ...]] = {
    1: (9.0, 8.5, 7.25, 4.0),
    2: (math.inf, 24.5, 100.5, 21.0),
    10: (math.inf, 101.0, 102.0, 98.0),
    11: (12.5, 11.0, 13.0, 10.0),
    12: (math.nan,) * 4,
    20: (math.inf, 26.0, 101.0, 20.0),
    30: (math.inf, 103.0, 101.0, 102.0),
}
"""By line: PSNR of each of `NAMES`; the other scores follow from it."""


def lines() -> tuple[PageLine, ...]:
    """Attacks, a control, a line that did not run, a float64 twin and a plain client."""
    plain = {"client": "plain", "setting": "a", "gamma": 0.0, "model": "ViT-Ti"}
    return (
        line(1, "APRIL as published", PSNR[1], marks=("below_floor",)),
        line(2, "pixel_lattice", PSNR[2], marks=("assumes_8_bit",)),
        line(10, "rounds_lattice", PSNR[10], uploads=10),
        line(11, "grey", PSNR[11], role="floor", folded=True, uploads=0),
        line(12, "gradient matching", PSNR[12], remark="not run: needs more than one step"),
        line(20, "pixel_lattice", PSNR[20], dtype="float64", folded=True),
        line(30, "closed form", PSNR[30], **plain),
    )


def _scores(psnr: Sequence[float]) -> dict[str, tuple[float | None, ...]]:
    capped = [None if math.isnan(value) else min(value, 100.0) for value in psnr]
    return {
        "psnr": tuple(None if math.isnan(value) else value for value in psnr),
        "ssim": tuple(None if v is None else v / 100 for v in capped),
        "lpips": tuple(None if v is None else 1 - v / 100 for v in capped),
        "mse": tuple(None if v is None else 10 ** (-v / 10) for v in capped),
        "fft2d": tuple(None if v is None else 0.0059 for v in capped),
    }


def _figure(of_line: int, attack: str, *flags: Flag) -> CardFigure:
    made = line(of_line, attack, PSNR[of_line])
    mean, low, high = made.scores["psnr"]
    counts = (made.n, made.exact, made.above_20, made.of)
    return CardFigure(attack, of_line, mean, low, high, made.median_psnr, *counts, flags)


def card() -> Card:
    """The plain client and one with MJP; the published attack is below the floor."""
    floor = _figure(11, "uniform grey")
    rows = (
        CardRow(
            *("plain", "ViT-Ti/16, setting (a), float32, batch 1", False, 71.5),
            *(None, _figure(30, "closed form"), None, floor),
        ),
        CardRow(
            *("MJP γ .27", "ViT-Ti/16, setting (c), float32, batch 1", True, 68.0),
            _figure(1, "APRIL as published", BELOW),
            _figure(2, "pixel_lattice", EIGHT_BIT),
            *(_figure(10, "rounds_lattice"), floor),
        ),
    )
    verdict = "MJP γ .27 does not protect these pictures: one upload gives 2 of 4 exactly."
    assumed = "Attacker: a server that sees one upload (γ .27, batch 1) and knows the model."
    facts = (
        ("Who attacks", "an honest but curious server that sees one client's gradient"),
        ("What it knows", "weights, the label, the shuffle ratio γ; not the permutation"),
        ("Client", "batch 1, one step, float32, setting (c), no DAL in the loss"),
        ("Model", "fine-tuned for five epochs; nobody trains exactly this one"),
    )
    not_tried = ("batches of more than one picture", "local steps", "secure aggregation")
    change = ("DAL in the loss: 21.1 dB from one upload", "autocast: no picture is exact")
    beside = "With up to 10 uploads of the same picture: all 4 exactly."
    return Card(verdict, assumed, beside, rows, 3, facts, not_tried, change, main=1)


def uri(image: Image.Image) -> str:
    """A picture as the data URI of a JPEG."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _pictures() -> dict[str, str]:
    found = {}
    noise = np.random.default_rng(0)
    for place, name in enumerate(NAMES):
        whole = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
        edge = min(whole.size)
        original = whole.crop((0, 0, edge, edge)).resize((SIZE, SIZE))
        found[f"{name}/original"] = uri(original)
        found[f"{name}/fed"] = uri(original.transpose(Image.Transpose.ROTATE_180))
        for number, psnr in PSNR.items():
            if number == 11 or math.isnan(psnr[place]):
                continue
            spread = 0 if psnr[place] > 60 else 250 / psnr[place]
            pixels = np.asarray(original.filter(ImageFilter.GaussianBlur(spread / 8)), float)
            pixels = pixels + noise.normal(0, spread * 2, pixels.shape)
            found[f"{name}/{number}"] = uri(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
        found[f"{name}/11"] = uri(Image.new("RGB", (SIZE, SIZE), (128, 128, 128)))
    return found


def _shown(pictures: dict[str, str]) -> tuple[PagePicture, ...]:
    mask = "".join("1" if place % 4 == 0 else "0" for place in range(SIDE * SIDE))
    return tuple(
        PagePicture(
            image_id=name,
            original=f"{name}/original",
            fed=f"{name}/fed",
            masks={1: mask, 2: mask, 10: "0" * SIDE * SIDE},
            lines={n: f"{name}/{n}" for n in PSNR if f"{name}/{n}" in pictures},
            strip=True,
            inputs=dict.fromkeys(PSNR, f"{name}/fed"),
        )
        for name in NAMES
    )


def chart(name: str, title: str) -> Chart:
    """A drawing of three curves."""
    curves = "".join(
        f'<path d="M40 {20 + 20 * k} C 160 {30 + 30 * k}, 300 {60 + 50 * k}, 460 210" fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
        for k, colour in enumerate(("#0072b2", "#d55e00", "#009e73"))
    )
    text = '<text x="250" y="244" text-anchor="middle" font-size="12" fill="currentColor">dB</text>'
    axis = '<path d="M40 10 V210 H470" fill="none" stroke="currentColor" stroke-opacity=".5"/>'
    return Chart(
        name,
        title,
        "Share of pictures at least this well recovered; bands are 95 % intervals.",
        f'<svg viewBox="0 0 500 250" width="500" height="250">{axis}{curves}{text}</svg>',
    )


GLOSSARY = (
    ("γ", "The share of patches that MJP shuffles and gives the same unknown position embedding."),
    ("E_unk", "The one position embedding that all shuffled patches share."),
    ("DAL", "A further loss that teaches unmasked patches where they stand."),
    ("setting (a)", "Nothing is shuffled."),
    ("setting (b)", "Scored against the shuffled picture that was fed."),
    ("setting (c)", "Scored against the original picture, put back in order by the attacker."),
    ("worst case", "For each picture the best attack of its group, chosen with the truth."),
    ("floor", "What a guess without any upload scores: a uniform grey."),
    ("PSNR", "Peak signal-to-noise ratio in dB; higher is a better reconstruction."),
    ("APRIL", "The published closed-form attack on attention's position embeddings."),
)


def page_content() -> PageContent:
    """A whole page of the four photographs."""
    pictures = _pictures()
    header = ("Client", "Attack", "Difference", "p (Holm)", "Effect")
    rows = (
        ("MJP γ .27 − plain", "best, one upload", "−27.90 [−31.12, −24.40]", "0.0021", "0.84"),
        ("MJP γ .27, DAL − plain", "best, one upload", "−78.89", "1.0e-05", "1.00"),
    )
    table = TextTable("Paired tests", "Wilcoxon, by photograph.", header, rows, "llrrr")
    return PageContent(
        title="What ViT-Ti+MJP leaks through its gradients",
        citation="Bin Ren, Yahui Liu, Yue Song, Wei Bi, Rita Cucchiara, Nicu Sebe and Wei Wang. "
        "Masked Jigsaw Puzzle. CVPR 2023.",
        card=card(),
        strip_columns=(
            ("published attack (APRIL)", 1),
            ("best, one upload", 2),
            ("any number", 10),
        ),
        lines=lines(),
        scores={number: _scores(psnr) for number, psnr in PSNR.items()},
        image_ids=NAMES,
        pictures=pictures,
        shown=_shown(pictures),
        charts={
            "distributions": (chart("ecdf", "ECDF of PSNR"), chart("success", "Success rate")),
            "uploads": (chart("uploads", "PSNR over uploads"),),
            "tradeoff": (chart("tradeoff", "Accuracy against leakage"),),
        },
        tables=(replace(table, title="Beside the paper"),),
        folded_tables=(replace(table, title="Diagnostics"), replace(table, title="Timings")),
        notes=(Section("What bounds the scores", ("The floor is a grey picture.", "γ is .27.")),),
        glossary=GLOSSARY,
        provenance=(("torch", "2.11.0"), ("commit", "0123456789abcdef" * 2), ("rows", "ab" * 32)),
        reproduce="mjp attack configs/demo.yaml --out runs/demo\nmjp report runs/demo",
        downloads=(("table.csv", "every line"), ("table.tex", "the same for a paper")),
        comparisons=(table,),
        exact={
            number: tuple(not math.isnan(v) and v >= 60 for v in psnr)
            for number, psnr in PSNR.items()
        },
        flags=(BELOW, EIGHT_BIT),
    )


def hostile_page() -> PageContent:
    """The same page; every text that could come from a run's folder tries to break out of it."""
    plain = page_content()
    flag = Flag(HOSTILE, HOSTILE, HOSTILE)
    table = TextTable(HOSTILE, HOSTILE, (HOSTILE,), ((HOSTILE,),), "l")
    row = replace(plain.card.rows[1], client=HOSTILE, details=HOSTILE, flags=(flag,))
    names = dict.fromkeys(("run", "model", "client", "setting", "dtype", "attack"), HOSTILE)
    first = replace(plain.lines[0], **names, remark="=1+1" + HOSTILE, marks=(HOSTILE,))  # type: ignore[arg-type]
    pictures = {**plain.pictures, HOSTILE: plain.pictures["coffee/original"]}
    picture = replace(plain.shown[0], image_id=HOSTILE, original=HOSTILE)
    return replace(
        plain,
        title=HOSTILE,
        citation=HOSTILE,
        card=replace(
            *(plain.card,),
            verdict=HOSTILE,
            assumptions=HOSTILE,
            beside=HOSTILE,
            rows=(row,),
            facts=((HOSTILE, HOSTILE),),
            not_tried=(HOSTILE,),
            would_change=(HOSTILE,),
        ),
        strip_columns=((HOSTILE, 1),),
        lines=(first, *plain.lines[1:]),
        image_ids=(HOSTILE, *NAMES[1:]),
        pictures=pictures,
        shown=(picture, *plain.shown[1:]),
        tables=(table,),
        folded_tables=(table,),
        notes=(Section(HOSTILE, (HOSTILE,)),),
        glossary=((HOSTILE, HOSTILE), *plain.glossary),
        provenance=((HOSTILE, HOSTILE),),
        reproduce=HOSTILE,
        downloads=((HOSTILE, HOSTILE), ("javascript:alert(1)", "x")),
        flags=(flag,),
        strip_caption=HOSTILE,
    )


def recorded_page() -> PageContent:
    """Recorded uploads without truth: reconstructions and residuals, no scores against a target."""
    plain = page_content()
    residual = {"gradient_residual": (0.0123, 0.01, 0.02)}
    some = [
        replace(
            *(found,),
            scores=residual,
            median_psnr=math.nan,
            exact=0,
            above_20=0,
            n=0,
            not_scored=len(NAMES),
            remark="no truth: recorded uploads",
        )
        for found in plain.lines[:3]
    ]
    empty = Card("Recorded uploads: nothing to score against.", "", "")
    return replace(
        plain,
        card=empty,
        lines=tuple(some),
        scores={found.number: {"gradient_residual": (0.01, 0.02, None, 0.015)} for found in some},
        shown=tuple(replace(p, original=None, fed=None, masks={}) for p in plain.shown),
        exact={},
        charts={},
        comparisons=(),
    )
