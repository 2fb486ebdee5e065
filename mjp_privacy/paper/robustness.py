"""`mjp evaluate --imagenet-c | --imagenet-a | --imagenet-o`: the paper's Tables 2 and 10."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from mjp_privacy.core.command import Outcome
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import pick_device
from mjp_privacy.core.progress import Progress
from mjp_privacy.core.text import shown
from mjp_privacy.data import (
    ImageError,
    ImageRecord,
    ImageSource,
    Preprocessing,
    open_images,
    spread_subset,
)
from mjp_privacy.data.labels import NUM_IMAGENET
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.zoo import named_checkpoints
from mjp_privacy.paper.corruptions import CORRUPTIONS, SEVERITIES
from mjp_privacy.paper.robustness_scores import (
    AGAINST_ALEXNET,
    CAVEATS,
    NORMALISED,
    UNNORMALISED,
    Line,
    PublishedRobustness,
    corruption_lines,
    counterpart,
    difference_lines,
    errors_by_cell,
    hard_lines,
    number_of_images,
    share,
    strange_lines,
    table_of,
    wrong_severities,
)
from mjp_privacy.paper.robustness_sets import (
    CorruptionFolders,
    answers,
    corruption_folders,
    two_hundred_classes,
)
from mjp_privacy.training.evaluation import (
    DASH,
    check_labels,
    check_options,
    load_checkpoint,
    markdown_table,
    papers_row,
    prepare_folder,
    with_interval,
    write_report,
)
from mjp_privacy.training.evaluation_arguments import EvaluationArguments

# the tables: a sentence, then the figures ---------------------------------------------------------

OWN = (
    "These images were made by `mjp sample --corrupt`: our own code, not the official files; "
    "corrupted.json beside them says what differs. Compare models with each other, not with "
    "figures of ImageNet-C."
)
HEADS = ("corruption", *(str(severity) for severity in SEVERITIES), "mean")


def markdown(lines: Sequence[Line]) -> str:
    """All lines, model by model and set by set, with notes below."""
    parts = []
    for key in dict.fromkeys((line.images, line.model) for line in lines):
        group = [line for line in lines if (line.images, line.model) == key]
        corrupted = any(line.corruption for line in group)
        parts += _corruption_table(group) if corrupted else _plain_table(group)
        parts.append("")
    return "\n".join([*parts, *(f"- {note}" for note in _notes(lines)), ""])


def _corruption_table(lines: Sequence[Line]) -> list[str]:
    model, images = lines[0].model, lines[0].images
    by_place = {(line.corruption, line.severity, line.measure): line for line in lines}
    counts = sorted({line.figure.n for line in lines if line.measure == "error"})
    numbers = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    present = [name for name in CORRUPTIONS if (name, None, "mean error") in by_place]
    printed = any(line.paper is not None for line in lines)
    against = [AGAINST_ALEXNET] if any(line.measure == AGAINST_ALEXNET for line in lines) else []
    text = (
        f"**{model}** on {images}: {_summary(lines, present)} "
        f"{numbers} images in each of {len(present) * len(SEVERITIES)} cells."
    )
    rows = []
    for name in present:
        cells = [name]
        cells += [_with_interval(by_place[name, severity, "error"]) for severity in SEVERITIES]
        total = by_place[name, None, "mean error"]
        cells += [_with_interval(total)]
        cells += [_with_interval(by_place[name, None, measure]) for measure in against]
        cells += [_beside(total)] if printed else []
        rows.append(cells)
    heads = [*HEADS, *against, *(["paper's mean"] if printed else [])]
    rest = [line for line in lines if not line.corruption]
    below = ["", *_plain_rows(rest)] if rest else []
    return [text, "", *markdown_table(heads, rows), *below]


def _summary(lines: Sequence[Line], present: Sequence[str]) -> str:
    """The sentence on mCE, or why there is none."""
    means = {line.measure: line for line in lines}
    if UNNORMALISED not in means:
        missing = [name for name in CORRUPTIONS if name not in present]
        return f"no mCE, which is a mean over all 15 corruptions; missing: {', '.join(missing)}."
    plain = f"{means[UNNORMALISED].figure.percent:.1f} unnormalised"
    if NORMALISED not in means:
        other = "and none against AlexNet, whose errors are among ImageNet's 1000 classes"
        return f"mCE {plain}, {other};"
    return f"mCE {means[NORMALISED].figure.percent:.1f} against AlexNet, {plain};"


def _plain_table(lines: Sequence[Line]) -> list[str]:
    first = lines[0]
    figure = f"{first.measure} {first.figure.percent:.1f} % of {first.figure.n} images"
    return [f"**{first.model}** on {first.images}: {figure}.", "", *_plain_rows(lines)]


def _plain_rows(lines: Sequence[Line]) -> list[str]:
    printed = any(line.paper is not None for line in lines)
    rows = []
    for line in lines:
        figure = line.figure
        n = f"{figure.n}" + (f" ({figure.failed} unreadable)" if figure.failed else "")
        cells = [line.measure, _with_interval(line), figure.interval, n]
        rows.append([*cells, *([_beside(line)] if printed else [])])
    heads = ["measure", "%", "interval", "n", *(["paper's"] if printed else [])]
    return markdown_table(heads, rows)


def _notes(lines: Sequence[Line]) -> Iterable[str]:
    if any(line.images == "our own corruptions" for line in lines):
        yield OWN
    if any(line.corruption for line in lines):
        yield (
            "Errors in %, with Wilson's 95 % interval; means over severities with a bootstrap over "
            "images. mCE is the mean of the 15 means: unnormalised as they are, or each divided by "
            "AlexNet's published error on the official files."
        )
    yield (
        "Photographs are cut out as the sets' official scripts do it: short side 256 for a side of "
        "224, bilinear; pictures of ImageNet-C are cut out already."
    )
    if any("difference to" in line.measure for line in lines):
        yield "Differences are paired: each image under one model with itself under the other."
    if any(line.measure == "AUPR" for line in lines):
        yield (
            "AUPR: strange images told from those of --data by the largest softmax share among the "
            "200 classes. It grows with the share of strange images, which chance would reach."
        )
    if any(line.measure == "RMS calibration error" for line in lines):
        yield (
            "RMS calibration error over all bins of 100 images; the official code leaves out the "
            "last bin."
        )
    if any(line.corruption and line.paper is not None for line in lines):
        yield from CAVEATS


def _with_interval(line: Line) -> str:
    return with_interval(line.figure.percent, line.figure.low, line.figure.high)


def _beside(line: Line) -> str:
    if line.paper is None:
        return DASH
    return f"{line.paper:g} ({line.figure.percent - line.paper:+.1f})"


# the command --------------------------------------------------------------------------------------

OFFICIAL_CELL = 50_000
"""Images under each corruption and severity of the published ImageNet-C."""
VALIDATION_OF_CLASS = 50
"""Images of each class in ImageNet's validation set."""


@dataclass(frozen=True)
class Model:
    """A network with its name in tables, and its row of the paper."""

    label: str
    network: LoadedModel
    paper: PublishedRobustness | None

    @property
    def whole(self) -> Preprocessing:
        """For pictures that are cut out already, as ImageNet-C's: nothing more is cut off."""
        size = self.network.card.img_size
        return Preprocessing(size, size, "bilinear")

    @property
    def cut(self) -> Preprocessing:
        """For photographs, cut out as ImageNet-C's were: not with the checkpoint's own crop."""
        return Preprocessing.robustness_sets(self.network.card.img_size)


@dataclass(frozen=True)
class Sets:
    """The sets of images that the command line names, opened and checked; `unreadable` gains the
    reasons of images that cannot be read, by their paths."""

    corrupted: CorruptionFolders | None
    hard: tuple[ImageSource, bool] | None  # ImageNet-A; whether it is the published set
    strange: tuple[ImageSource, bool] | None  # ImageNet-O
    ordinary: ImageSource | None  # --data
    unreadable: dict[str, str] = field(default_factory=dict)

    def note(self, source: ImageSource, error: ImageError) -> None:
        """Keep why an image of this set cannot be read."""
        self.unreadable[str(source.path / error.image_id)] = error.reason


def write_robustness(arguments: EvaluationArguments) -> Outcome:
    """The tables of all checkpoints as Markdown; files in --out are updated as models are done."""
    check_options(arguments)
    sets = _opened(arguments)
    lines: list[Line] = []
    errors: dict[str, pd.DataFrame] = {}
    text = ""
    for more in _measured(arguments, sets, errors):
        lines += more
        text = markdown(lines)
        if arguments.out:
            reasons = pd.DataFrame(sets.unreadable.items(), columns=["image", "reason"])
            tables = {"unreadable.csv": reasons}
            if errors:
                wrong = [wrong_severities(mine, label) for label, mine in errors.items()]
                tables["per_image.csv"] = pd.concat(wrong).reset_index()
            tables["robustness.csv"] = table_of(lines)
            write_report(arguments.out, tables, "robustness.md", text)
    return Outcome(text, sets.unreadable, table_of(lines).to_dict("records"))


def _opened(arguments: EvaluationArguments) -> Sets:
    if arguments.imagenet_o and arguments.data is None:
        raise UserError(
            "--imagenet-o: AUPR tells strange images from ordinary ones. Expected --data with "
            "photographs of its 200 classes, such as ImageNet's validation set; got none."
        )
    c, a, o = arguments.imagenet_c, arguments.imagenet_a, arguments.imagenet_o
    sets = Sets(
        corruption_folders(c) if c else None,
        two_hundred_classes(a, "A") if a else None,
        two_hundred_classes(o, "O") if o else None,
        _ordinary(arguments) if arguments.data else None,
    )
    images = ("imagenet_c", "imagenet_a", "imagenet_o", "data")
    prepare_folder(arguments, "robustness.csv", *images)
    return sets


def _ordinary(arguments: EvaluationArguments) -> ImageSource:
    source = open_images(str(arguments.data), arguments.labels)
    if source.records[0].label is None:
        raise UserError(
            f"--data: expected images with labels beside robustness. {source.labels_described} "
            "Give --labels, class folders, or leave --data out."
        )
    return source


def _models(arguments: EvaluationArguments, sets: Sets) -> list[Model]:
    """All checkpoints, loaded before work begins, so that mistakes show at once."""
    device = pick_device(arguments.device)
    models = []
    for checkpoint in named_checkpoints(arguments.checkpoint, "--checkpoint"):
        network = load_checkpoint(checkpoint, arguments).to(device)
        if (sets.hard or sets.strange) and network.card.num_classes != NUM_IMAGENET:
            raise UserError(
                f"{checkpoint.label} has {network.card.num_classes} classes; ImageNet-A and -O "
                "need a model of ImageNet's 1000. Give another --checkpoint."
            )
        plain = sets.corrupted.plain_classes if sets.corrupted else None
        if plain not in (None, network.card.num_classes):
            raise UserError(
                f"--imagenet-c was made of {plain} class folders, numbered in sorted order, and "
                f"{checkpoint.label} has {network.card.num_classes} classes: expected as many, or "
                "the numbers are not the model's. Give images in folders of synsets or of class "
                "indices to `mjp sample --corrupt`, or another --checkpoint."
            )
        if sets.ordinary:
            check_labels(checkpoint.label, network, sets.ordinary.records)
        paper = counterpart(network, papers_row(checkpoint, arguments))
        models.append(Model(checkpoint.label, network, paper))
    return models


def _measured(
    arguments: EvaluationArguments, sets: Sets, errors: dict[str, pd.DataFrame]
) -> Iterator[list[Line]]:
    """The lines of one model and set after the other; `errors` gains each model's answers to the
    corrupted images."""
    for model in _models(arguments, sets):
        if sets.corrupted:
            lines, mine = _under_corruptions(model, sets, arguments)
            for other, others in errors.items():
                images, classes = lines[-1].images, model.network.card.num_classes
                lines += difference_lines(model.label, images, mine, other, others, classes=classes)
            errors[model.label] = mine
            yield lines
        if sets.hard:
            yield _on_hard(model, sets, arguments)
        if sets.strange and sets.ordinary:
            yield _on_strange(model, sets, arguments)


def _under_corruptions(
    model: Model, sets: Sets, arguments: EvaluationArguments
) -> tuple[list[Line], pd.DataFrame]:
    folders = sets.corrupted
    assert folders is not None
    limit, seed = arguments.limit, arguments.seed
    with Progress(model.label, partial(number_of_images, folders, limit), "images") as bar:
        errors = errors_by_cell(
            model.network,
            folders,
            model.whole,
            limit=limit,
            seed=seed,
            check=lambda source: check_labels(
                model.label, model.network, source.records, "--imagenet-c"
            ),
            progress=bar.advance,
            unreadable=sets.note,
        )
    whole = folders.official and len(errors) == OFFICIAL_CELL
    images = "ImageNet-C" if folders.official else "our own corruptions"
    paper = model.paper if whole else None
    classes = model.network.card.num_classes
    lines = corruption_lines(model.label, images, errors, paper, classes=classes)
    if sets.ordinary:
        rows = _answers(model, sets, sets.ordinary, sets.ordinary.records, arguments)
        clean = share(1 - rows["correct"].to_numpy(dtype=float))
        lines.insert(0, Line(model.label, images, "error without corruption", clean))
    return lines, errors


def _on_hard(model: Model, sets: Sets, arguments: EvaluationArguments) -> list[Line]:
    assert sets.hard is not None
    source, official = sets.hard
    rows = _answers(model, sets, source, source.records, arguments, _classes(source))
    whole = official and arguments.limit is None
    return hard_lines(model.label, "ImageNet-A", rows, model.paper if whole else None)


def _on_strange(model: Model, sets: Sets, arguments: EvaluationArguments) -> list[Line]:
    assert sets.strange is not None
    assert sets.ordinary is not None
    (source, official), ordinary = sets.strange, sets.ordinary
    classes = _classes(source)
    of_them = tuple(record for record in ordinary.records if record.label in classes)
    if not of_them:
        raise UserError(
            "--data holds no image of ImageNet-O's 200 classes: expected photographs of these, as "
            f"ImageNet's validation set has them. {ordinary.labels_described}"
        )
    to_strange = _answers(model, sets, source, source.records, arguments, classes)
    to_ordinary = _answers(model, sets, ordinary, of_them, arguments, classes)
    whole = official and len(to_ordinary) == len(classes) * VALIDATION_OF_CLASS
    paper = model.paper if whole and arguments.limit is None else None
    return strange_lines(model.label, "ImageNet-O", to_strange, to_ordinary, paper)


def _answers(
    model: Model,
    sets: Sets,
    source: ImageSource,
    records: Sequence[ImageRecord],
    arguments: EvaluationArguments,
    classes: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The model's answers to photographs, among these classes; UserError where one restricts them
    and no image can be read."""
    chosen = spread_subset(records, arguments.limit, arguments.seed)
    with Progress(model.label, lambda: len(chosen), "images") as bar:
        rows = answers(
            model.network,
            source,
            chosen,
            model.cut,
            classes=classes,
            progress=bar.advance,
            unreadable=partial(sets.note, source),
        )
    if classes is not None and not (rows["status"] == "ok").any():
        first = next(iter(sets.unreadable.items()), ("", ""))
        raise UserError(
            f"None of the {len(rows)} images of {source.path.name} can be read, such as "
            f"{shown(first[0])}: {shown(first[1])}. Expected at least one: unpack the archive "
            "again, or mend that."
        )
    return rows


def _classes(source: ImageSource) -> list[int]:
    return sorted({record.label for record in source.records if record.label is not None})
