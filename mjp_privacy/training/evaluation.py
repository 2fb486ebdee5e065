"""Measures trained models on the same images, shuffled in the same way.

Top-1, top-5 and, as the paper measures how much shuffling the input changes the answer:

    Diff. Norm.   ‖[CLS](x) − [CLS](x̃)‖₂ after the last norm, the classifier's input
    Consistency   whether argmax F(x) = argmax F(x̃)

x̃ is x with a share γ of its patches shuffled; a model with an unknown embedding gets their mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.drawing import band, colour, dashes, drawn, picture
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import check_own, output_folder, write_atomically
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.schema import height_width, size_of
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    ImageSource,
    Preprocessing,
    open_images,
    spread_subset,
)
from mjp_privacy.data.images import keep_apart
from mjp_privacy.metrics.statistics import DASH, summarise
from mjp_privacy.models import LoadedModel, load_model
from mjp_privacy.models.checkpoint_files import read_metadata
from mjp_privacy.models.jigsaw import draw_masks, shuffle_patches
from mjp_privacy.models.zoo import NamedCheckpoint, named_checkpoints
from mjp_privacy.training.batches import check_labels
from mjp_privacy.training.commands import EvaluationArguments
from mjp_privacy.training.config import PUBLISHED, Preset, TrainingConfig, recipe_in

# what the paper prints of its models (published.yaml) -------------------------------------------


@dataclass(frozen=True)
class PublishedModel:
    """One printed row, for ImageNet-1K at 224; top1 and consistency in percent.

    diff_norm is the L2 norm of the difference that shuffling makes to [CLS]; network: what the row
    was trained as, where the paper has it in no other table.
    """

    table: int
    row: str
    top1: float
    consistency: float
    diff_norm: float | None = None
    network: Sequence[str | bool] = ()

    @property
    def label(self) -> str:
        return f"Table {self.table}, {self.row}"


TABLE1 = tuple(PublishedModel(1, **row) for row in PUBLISHED["table_1"])
TABLE3 = {
    row["gamma"]: PublishedModel(
        3, f"γ = {row['gamma']:g}", row["top1"], row["consistency"], row["diff_norm"]
    )
    for row in PUBLISHED["table_3"]
}
"""DeiT-S + MJP by the shuffle ratio it was trained with."""
TABLE4 = {row["row"][0]: PublishedModel(4, **row) for row in PUBLISHED["table_4"]}
MAIN_GAMMA = 0.03
"""The shuffle ratio that the rows of Tables 1 and 4 were trained with."""


def counterpart(config: TrainingConfig | None) -> PublishedModel | None:
    """The printed row of the model that was trained with the same switches.

    Table 4's row J has a row for each shuffle ratio in Table 3. None: the paper printed no such
    model.
    """
    if config is None or config.initial is not None:
        return None
    model, jigsaw = config.model, config.jigsaw
    network = [
        *(config.family, model.position_embedding, jigsaw.shuffle),
        *(model.unknown_embedding, model.index_embedding, model.dal),
    ]
    row = next((row for row in (*TABLE4.values(), *TABLE1) if row.network == network), None)
    weight = (jigsaw.dal_lambda, jigsaw.dal_target, jigsaw.dal_schedule)
    shuffles = jigsaw.shuffle != "none"
    if (
        row is None
        or model.first_block != "intact"
        or jigsaw.position_confound
        or (shuffles and jigsaw.share != 0.5)
        or (model.unknown_embedding and jigsaw.position_init != "paper")
        or (model.dal != "none" and weight != (0.01, "raw", "constant"))
    ):
        return None
    if row == TABLE4["J"]:
        return TABLE3.get(jigsaw.gamma)
    has_gamma = jigsaw.shuffle == "patches" or (shuffles and config.family != "vit")
    return None if has_gamma and jigsaw.gamma != MAIN_GAMMA else row


# how it is measured -----------------------------------------------------------------------------

ACCURACY = ("top1", "top5", "top1_shuffled")
CONSISTENCY = ("diff_norm", "consistency")
OUR_GAMMA = 0.27


@dataclass(frozen=True)
class Protocol:
    """A group of measures, the images they are taken on, and how these are shuffled."""

    measures: tuple[str, ...] = (*ACCURACY, *CONSISTENCY)
    gammas: tuple[float, ...] = (OUR_GAMMA,)
    fit: Literal["checkpoint", "crop_256", "squash"] = "checkpoint"
    mask_per: Literal["image", "batch"] = "image"

    def preparation(self, model: LoadedModel) -> Preprocessing:
        card = model.card
        if self.fit == "checkpoint":
            return Preprocessing(card.img_size, card.resize, card.interpolation)  # type: ignore[arg-type]
        if self.fit == "squash":
            return Preprocessing(card.img_size, squash=True)
        return Preprocessing(card.img_size, min(height_width(card.img_size)) * 256 // 224)


def protocols(preset: Preset, gammas: tuple[float, ...] | None = None) -> tuple[Protocol, ...]:
    """What to measure under a preset; `gammas` replace the preset's own.

    protocols("authors_code")   # accuracy at γ = .9 with one mask a batch; consistency at γ = .5
    """
    given = None if gammas is None else tuple(sorted(set(gammas)))
    if preset != "authors_code":
        return (Protocol(gammas=given or (OUR_GAMMA,)),)
    return (
        Protocol(ACCURACY, given or (0.9,), "crop_256", "batch"),
        Protocol(CONSISTENCY, given or (0.5,), "squash"),
    )


# measuring -------------------------------------------------------------------------------------

BATCH = 128


def opened_batches(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    prepare: Preprocessing,
    unreadable: dict[ImageRecord, str],
    progress: Callable[[int], object] = lambda done: None,
) -> Iterator[tuple[list[ImageRecord], Tensor]]:
    """The images that can be read, prepared for the model, a batch at a time with their records.

    unreadable: gains each of the others and the reason
    progress: called after each batch with the number of its images
    """
    for start in range(0, len(records), BATCH):
        batch = records[start : start + BATCH]
        readable, images = [], []
        for record in batch:
            try:
                images.append(prepare(source.decode(record, min_side=model.patch_size)))
                readable.append(record)
            except ImageError as error:
                unreadable[record] = error.reason
        if readable:
            yield readable, torch.stack(images)
        progress(len(batch))


@torch.no_grad()
def measure(
    model: LoadedModel,
    source: ImageSource,
    records: Sequence[ImageRecord],
    protocol: Protocol,
    *,
    seed: int = 0,
    progress: Callable[[int], object] = lambda done: None,
) -> pd.DataFrame:
    """A row for each image and γ; an image that cannot be read has rows with the reason."""
    prepare = protocol.preparation(model)
    parts: list[pd.DataFrame] = []
    failed: dict[ImageRecord, str] = {}
    for batch, images in opened_batches(model, source, records, prepare, failed, progress):
        plain, embedding = _outputs(model, images, None)
        predicted, best = plain.argmax(-1), plain.topk(min(5, plain.shape[-1])).indices
        labels = torch.tensor([-1 if record.label is None else record.label for record in batch])
        masked = batch if protocol.mask_per == "image" else batch[:1]
        ids = [record.image_id for record in masked]
        for gamma in protocol.gammas:
            puzzle = draw_masks(ids, grid=model.grid, gamma=gamma, round=0, seed=seed)
            mask, permutation = (one.expand(len(batch), -1) for one in puzzle)
            fed = shuffle_patches(images, permutation, model.patch_size)
            shuffled, shuffled_embedding = _outputs(model, fed, mask)
            jumbled = shuffled.argmax(-1)
            found = {
                "predicted": predicted,
                "predicted_shuffled": jumbled,
                "top1": (predicted == labels).double(),
                "top5": (best == labels[:, None]).any(-1).double(),
                "top1_shuffled": (jumbled == labels).double(),
                "diff_norm": (embedding - shuffled_embedding).norm(dim=-1),
                "consistency": (predicted == jumbled).double(),
                "masked_patches": mask.sum(-1),
            }
            for name in {*ACCURACY} & found.keys():
                found[name][labels < 0] = math.nan
            for name in MEASURES.keys() - set(protocol.measures):
                del found[name]
            columns = {name: column.tolist() for name, column in found.items()}
            parts.append(_rows(batch, gamma).assign(**columns))
    for record, reason in failed.items():
        parts += [_rows([record], gamma, "failed", reason) for gamma in protocol.gammas]
    return pd.concat(parts, ignore_index=True)


def _rows(
    records: Sequence[ImageRecord], gamma: float, status: str = "ok", reason: str = ""
) -> pd.DataFrame:
    """Which images they are of, and at which γ."""
    told = [(record.image_id, record.group, record.label) for record in records]
    rows = pd.DataFrame(told, columns=["image_id", "group", "label"])
    return rows.assign(gamma=gamma, status=status, reason=reason)


def _outputs(model: LoadedModel, images: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and the [CLS] embedding, or what the classifier reads in its place, on the CPU."""
    like = model.like
    on_device = None if mask is None else mask.to(like.device)
    x = model.normalize(images.to(like))
    if model.family != "timm":
        features = model.forward_features(x, on_device)
        return model.forward_head(features).cpu(), features[:, 0].cpu()
    read: list[Tensor] = []  # its own forward alone says what a network of timm's classifies by
    heads: Any = vars(model)["net"].get_classifier()
    first = heads[0] if isinstance(heads, tuple) else heads
    handle = first.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        return model(x, on_device).cpu(), read[0].flatten(1).cpu()
    finally:
        handle.remove()


# tables ----------------------------------------------------------------------------------------

MEASURES = {  # name: heading, direction that is better for the model, factor, decimals
    "top1": ("Top-1 %", "↑", 100, ".1f"),
    "top5": ("Top-5 %", "↑", 100, ".1f"),
    "top1_shuffled": ("Top-1 % shuffled", "↑", 100, ".1f"),
    "diff_norm": ("Diff. Norm.", "↓", 1, ".2f"),
    "consistency": ("Consistency %", "↑", 100, ".1f"),
}
PRINTED = {"top1": "Top-1", "diff_norm": "Diff. Norm.", "consistency": "Cons."}
"""What the paper prints of a model."""
PAPERS_GAMMA_UNKNOWN = (
    "The paper does not print the γ of its shuffled images for Tables 3 and 4; its models are "
    "DeiT-S on ImageNet-1K at 224. Figures stand beside ours unadjusted; a difference says "
    "something only for that model on that data."
)

MEASURED = {
    "paper": "Preset paper: the paper does not print how it measures; this is as without a preset.",
    "authors_code": "Preset authors_code: accuracy on crops of 256/224, shuffled with one mask for "
    "128 images; Diff. Norm. and Consistency on whole pictures squashed to a square; ImageNet's "
    "mean and std, where the command gave none. Not to be compared with figures without it.",
}
INTERVALS = (
    "Mean [95 % interval over images], n = images; shares have Wilson's, others a bootstrap's, "
    "of fewer than 30 Student's. "
    "Each image is shuffled once and each line is one trained model; the intervals do not cover "
    "either choice."
)

Line = dict[str, object]


def summary_lines(
    label: str,
    model: LoadedModel,
    measured: pd.DataFrame,
    paper: PublishedModel | None,
    preset: Preset,
) -> list[Line]:
    """A line for each γ: mean, interval and n of every measure, the paper's figures.

    measured: a row for each image and γ, or two where accuracy and consistency are measured on
              different pictures of it
    """
    lines: list[Line] = []
    condition = math.nan  # of the patch embedding: how much inverting it amplifies errors
    if model.family != "resnet":
        weight = model.patch_embed.proj.weight.detach().flatten(1).double()
        condition = float(torch.linalg.cond(weight))
    shared: Line = {
        "model": label,
        **({} if preset == "ours" else {"preset": preset}),
        "trained_gamma": model.card.trained_gamma,
        "cond_w": condition,
    }
    for gamma, rows in measured.groupby("gamma", sort=True):
        whole = (rows["status"] == "ok").groupby(rows["image_id"]).all()  # of an image's rows
        line = shared | {"gamma": gamma, "n": int(whole.sum()), "failed": int((~whole).sum())}
        known = set[str]()
        for name, (_, _, factor, _) in MEASURES.items():
            none = pd.Series(math.nan, index=rows.index)
            values = rows[name].astype(float) if name in rows else none
            counted = values.notna() | (rows["status"] != "ok")  # images that failed, too
            of, scores = rows[counted], values[counted].to_numpy()
            summary = summarise(scores, list(of["status"]), groups=list(of["group"]))
            if name != "diff_norm":
                summary = summary.as_share()
            known |= set() if math.isnan(summary.mean) else {name}
            line[name] = factor * summary.mean
            line[f"{name}_low"] = factor * summary.low
            line[f"{name}_high"] = factor * summary.high
        printed = paper if gamma else None  # the paper's figures are of shuffled input
        line["paper_row"] = printed.label if printed else ""
        for name in PRINTED:
            line[f"paper_{name}"] = getattr(printed, name) if printed and name in known else None
        lines.append(line)
    return lines


def markdown(table: pd.DataFrame, about_files: Iterable[str]) -> str:
    heads = ["Model", "trained γ", "cond(W)", "γ", "n"]
    heads += [f"{title} {arrow}" for title, arrow, *_ in MEASURES.values()]
    heads += ["paper's row", *(f"paper's {name} (Δ)" for name in PRINTED.values())]
    rows = []
    for line in table.to_dict("records"):
        cells = [str(line["model"]), shown_number(line["trained_gamma"], "g")]
        cells += [shown_number(line["cond_w"], ".1f"), shown_number(line["gamma"], "g")]
        cells.append(counted(line["n"], line["failed"], "failed"))
        cells += [interval_of(line, name, form) for name, (*_, form) in MEASURES.items()]
        cells.append(str(line["paper_row"]) or DASH)
        cells += [beside(line[f"paper_{n}"], line[n], MEASURES[n][3]) for n in PRINTED]
        rows.append(cells)
    notes = sorted({*about_files})
    if table["paper_row"].any():
        notes.append(PAPERS_GAMMA_UNKNOWN)
    notes += [MEASURED[preset] for preset in table.get("preset", pd.Series(dtype=str)).unique()]
    return noted_table(heads, rows, [*notes, INTERVALS])


def noted_table(heads: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    """A table in Markdown with notes below."""
    return "\n".join([*markdown_table(heads, rows), "", *(f"- {note}" for note in notes), ""])


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown; a bar in a cell is escaped."""
    first, *rest = (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for cells in (heads, *rows)
    )
    return [first, "|" + "---|" * len(heads), *rest]


def shown_number(value: float | None, form: str) -> str:
    return DASH if value is None or pd.isna(value) else format(value, form)


def with_interval(mean: float, low: float, high: float, form: str = ".1f") -> str:
    """`12.3 [11.0, 13.6]`; a dash for NaN, and no interval where its ends are NaN."""
    if pd.isna(mean) or pd.isna(low):
        return shown_number(mean, form)
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def interval_of(line: Mapping[Any, Any], name: str, form: str = ".1f") -> str:
    """The same of a line that has the columns name, name_low and name_high."""
    return with_interval(line[name], line[f"{name}_low"], line[f"{name}_high"], form)


def counted(n: int, failed: int, word: str) -> str:
    """`14 (1 failed)`"""
    return f"{n}" + (f" ({failed} {word})" if failed else "")


def beside(paper: float | None, ours: float, form: str) -> str:
    """The paper's figure, and ours minus it."""
    if paper is None or pd.isna(paper) or pd.isna(ours):
        return shown_number(paper, form)
    return f"{paper:{form}} ({ours - paper:+{form}})"


def draw_sweep(table: pd.DataFrame, path: Path) -> None:
    """Draw consistency, [CLS] difference and top-1 over γ as in Fig. 3, a line for each model."""
    names = ("consistency", "diff_norm", "top1_shuffled")
    with picture(path, 11, 3.4) as figure:
        for axes, name in zip(figure.subplots(1, 3), names, strict=True):
            for number, (label, line) in enumerate(table.groupby("model", sort=False)):
                points = line[line[name].notna()]  # a protocol measures some of the three
                look = {"color": colour(number), "linestyle": dashes(number), "marker": "o"}
                axes.plot(points["gamma"], points[name], markersize=3, label=drawn(label), **look)
                ends = points[f"{name}_low"], points[f"{name}_high"]
                band(axes, points["gamma"], *ends, colour(number))
            axes.set_title(f"{MEASURES[name][0]} {MEASURES[name][1]}")
            axes.set_xlabel("γ of the shuffled input")
        figure.axes[0].legend()


# the command -----------------------------------------------------------------------------------


def write_evaluation(arguments: EvaluationArguments) -> Outcome:
    """The table of all checkpoints as Markdown; files in --out are updated after each checkpoint.

    write_evaluation(EvaluationArguments(("cifar_vit",), Path("cifar10-test.zip"))).text
    """
    prepare_folder(arguments, "data")
    if arguments.data is None:
        raise UserError(
            "mjp evaluate: expected images, got none. Give --data for accuracy and consistency, or "
            "--imagenet-c, --imagenet-a or --imagenet-o for robustness."
        )
    source = open_images(arguments.data, arguments.labels)
    records = spread_subset(source.records, arguments.limit, arguments.seed)
    asked = protocols(arguments.preset, arguments.gamma)
    lines: list[Line] = []
    parts: list[pd.DataFrame] = []
    notes: list[str] = []
    text, table, rows = "", pd.DataFrame(), pd.DataFrame()
    for label, model, paper in loaded_models(arguments, {"--data": source}):
        with Progress(label, lambda: len(records) * len(asked), "images") as bar:
            measured = pd.concat(
                measure(model, source, records, one, seed=arguments.seed, progress=bar.advance)
                for one in asked
            )
        lines += summary_lines(label, model, measured, paper, arguments.preset)
        notes += [f"{label}: {note}" for note in model.card.checkpoint.notes]
        parts.append(measured.assign(model=label))
        table, rows = pd.DataFrame(lines), pd.concat(parts)
        text = markdown(table, notes)
        files = {"per_image.csv": rows, "summary.csv": table}
        write_report(arguments.out, files, "table.md", text)
        if arguments.out and table["gamma"].nunique() > 1:
            draw_sweep(table, arguments.out / "sweep.png")
    failed = rows[rows["status"] != "ok"]
    reasons = dict(zip(failed["image_id"], failed["reason"], strict=True))
    return Outcome(text, reasons, table.to_dict("records"))


def prepare_folder(arguments: EvaluationArguments, *images: str) -> None:
    """Make --out before any work: new or empty, and apart from the images that these options
    name."""
    if arguments.out:
        options = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in images}
        keep_apart(arguments.out, options)
        check_own(output_folder(arguments.out))


def write_report(
    out: Path | None, tables: Mapping[str, pd.DataFrame], name: str, text: str
) -> None:
    """Write the tables as CSV files, and the Markdown text under its name, each whole or not; None:
    the command has no --out."""
    if out is not None:
        for file, table in tables.items():
            write_atomically(out / file, partial(table.to_csv, index=False))
        write_atomically(out / name, lambda path: path.write_text(text, encoding="utf-8"))


class Loaded(NamedTuple):
    """A network with its name in tables, and the paper's row to stand beside: that of the switches
    which our trainer wrote into its file."""

    label: str
    network: LoadedModel
    row: PublishedModel | None


def loaded_models(
    arguments: EvaluationArguments, images: Mapping[str, ImageSource | None]
) -> list[Loaded]:
    """All checkpoints, loaded and held against the labels of the images, by their options, before
    work begins, so that mistakes show at once."""
    device, models = pick_device(arguments.device), []
    for checkpoint in named_checkpoints(arguments.checkpoint, "--checkpoint"):
        model, label = load_checkpoint(checkpoint, arguments), checkpoint.label
        for option, source in images.items():
            if source is not None:
                check_labels(source.records, model.card.num_classes, option, label)
        row = counterpart(recipe_in(read_metadata(checkpoint.source)))
        models.append(Loaded(label, model.to(device), row))
    return models


def load_checkpoint(checkpoint: NamedCheckpoint, arguments: EvaluationArguments) -> LoadedModel:
    authors = arguments.preset == "authors_code"
    told = (arguments.model, arguments.mean, arguments.std)
    name, mean, std = told if checkpoint.described else (None, None, None)
    mean = IMAGENET_DEFAULT_MEAN if authors and arguments.mean is None else mean
    std = IMAGENET_DEFAULT_STD if authors and arguments.std is None else std
    overrides: dict[str, Any] = {
        "img_size": size_of(arguments.img_size),
        "mean": mean,
        "std": std,
        "position_embedding": arguments.position_embedding,
        "unknown_embedding": arguments.unknown_embedding,
    }
    return load_model(name, checkpoint=checkpoint.source, unknown_init="mean_position", **overrides)
