"""The command `mjp attack`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.command import DONE, SOME_FAILED, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import stock_config
from mjp_privacy.core.schema import size_of
from mjp_privacy.core.text import counted, plain, shown
from mjp_privacy.experiment.config import (
    SUFFIXES,
    DtypeName,
    Experiment,
    check_attacks,
    check_experiment,
    load_experiment,
)
from mjp_privacy.experiment.engines.options import AUTO, EngineConfig, engine_config
from mjp_privacy.experiment.overrides import (
    check_models,
    unreached,
    with_changes,
    with_only,
    with_published_attacks,
)

if TYPE_CHECKING:
    from mjp_privacy.experiment.run import RunSummary

REASONS_SHOWN = 5  # reasons of failures that are printed
BLANK = {"name": "none", "models": {"none": {}}, "grid": [{"models": ["none"], "settings": ["a"]}]}
"""An experiment for --help without a config, or until the command line is parsed."""
MODEL_OPTIONS = ("model", "img_size", "mean", "std", "num_heads")
"""Options of `mjp attack` that are fields of every model of the config."""
SHARED = ("limit", "attack_seconds", "device", "into", "add")
"""Options that simulated and recorded uploads have in common."""


@dataclass(frozen=True)
class Overrides:
    """Fields of the config that the command line can change; their defaults are the file's."""

    seed: int
    """Seed of the puzzle, the subset of images and every other random choice."""
    block: int
    """Images that are attacked together; float32 results of APRIL depend slightly on it."""
    dtypes: tuple[DtypeName, ...]
    """Precisions of the client's gradient."""
    data_is_papers: bool
    """The images are ImageNet-1K validation images, so the paper's figures may stand beside."""
    client: ClientConfig


@dataclass(frozen=True)
class AttackArguments:
    """Attack every image in every cell of CONFIG. Running it again does only what is missing."""

    config: tyro.conf.Positional[Path]
    """A YAML file, such as configs/table5.yaml, or a stock config's name, such as table5."""
    overrides: Annotated[Overrides, tyro.conf.arg(name="")]
    out: Path | None = None
    """The run folder; results/NAME if left out, for `own` results/own/WEIGHTS-1f09c3, with six
    digits of what the weights are. If it holds an interrupted run, that run is continued."""
    images: str | None = None
    """A folder, a zip, or `embedded`: photographs every installation has."""
    weights: tuple[str, ...] = ()
    """Checkpoints: PATH for all of the config's models, or NAME=PATH for one; several can be
    given. NAME=random: seeded untrained weights."""
    model: str | None = None
    """The architecture of all of the config's models, such as vit_small_patch16_224, where the
    weights do not tell it."""
    img_size: str | None = None
    """Their input size, a side such as 192 or height and width such as 96x64, in place of the
    config's or the weights' own."""
    mean: tuple[float, ...] = ()
    """Their normalisation: one number or three, in place of the config's or the weights' own."""
    std: tuple[float, ...] = ()
    num_heads: int | None = None
    """Their number of attention heads, which does not show in weights."""
    labels: Path | None = None
    """A label file; without one, labels are looked for beside the images."""
    limit: int | None = None
    """Attack only this many images: a seeded subset spread over the classes, which is part of the
    subset of any larger limit; a file that is no image is replaced by another."""
    uploads: Path | None = None
    """A folder of recorded uploads to attack instead of clients simulated from the config's models
    and images."""
    gamma: float | None = None
    """Shuffle ratio of settings b and c, instead of the config's."""
    only: tuple[str, ...] = ()
    """Attack only models whose names hold one of these texts."""
    published_only: bool = False
    """Run those of the config's attacks alone that the paper ran."""
    attack_seconds: float | None = None
    """The processor's time that an attack may take over one image; past it the image's row is the
    best so far, or `unsupported`. A later command with more time makes those rows again."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where gradients are computed; auto takes CUDA if there is a GPU."""
    fresh: bool = False
    """Make results again that an earlier version of their attack or defence made; without this or
    --keep the command stops where it finds any."""
    keep: bool = False
    """Keep such results and do what is missing; rows say in `code` what made them."""
    into: bool = False
    """Write into a folder that holds other files and no run."""
    add: bool = False
    """Put this experiment beside another one into its run's folder, so that they share a table."""
    by: Annotated[EngineConfig, tyro.conf.arg(name="")] = AUTO


def attack(argv: list[str], usage: Usage, answer: Callable[[Path], str] | None = None) -> int:
    """`mjp attack`: run an experiment, or attack recorded uploads, and print what failed.

    answer: what is said of the run folder's rows at the end
    """
    named = _config_in(argv)
    experiment = load_experiment(BLANK if named is None else named)
    arguments = _parse(argv, usage, experiment)
    if named is None or Path(named) != arguments.config:  # an option's value looked like a config
        named = str(arguments.config)
        experiment = load_experiment(named)
        arguments = _parse(argv, usage, experiment)
    engine = engine_config(arguments.by)  # a mistake in it is told before anything is read
    configured = experiment
    experiment = dataclasses.replace(experiment, **vars(arguments.overrides))
    check_experiment(experiment, named)
    if arguments.uploads is not None:
        _refuse_idle_options(arguments, configured, arguments.uploads)
    experiment = with_only(experiment, arguments.only)
    left_out = tuple(f"{name}=" for name in configured.models if name not in experiment.models)
    weights = tuple(text for text in arguments.weights if not text.startswith(left_out))
    arguments = dataclasses.replace(arguments, weights=weights)
    if arguments.published_only:
        experiment = with_published_attacks(experiment)
    if arguments.uploads is None:
        for note in unreached(configured, experiment):
            print(note, file=sys.stderr)
    summary = _run(arguments, experiment, engine)
    of = f"{counted(summary.images, 'image')} in {counted(summary.cells, 'cell')}"
    print(f"{of}: {summary.out}")
    if summary.inapplicable:
        print("Not applicable, each a row with its reason:")
        for line in summary.inapplicable:
            print(f"  {line}")
    if answer is not None:
        print(f"\n{answer(summary.out)}")
    print(f"Next: mjp report {summary.out}")
    for title, lines in (
        ("Failed; each is a row with its reason:", summary.failures),
        ("Not done; the same command goes on with these blocks:", summary.not_done),
    ):
        if lines:
            further = len(lines) - REASONS_SHOWN
            rest = [f"… and {further} further reason(s)"] if further > 0 else []
            shown_lines = [f"  {plain(line)}" for line in (*lines[:REASONS_SHOWN], *rest)]
            print(title, *shown_lines, sep="\n", file=sys.stderr)
    return DONE if summary.exit_code == 0 else SOME_FAILED


def _run(arguments: AttackArguments, experiment: Experiment, engine: EngineConfig) -> RunSummary:
    if arguments.uploads is None:
        from mjp_privacy.data.images import check_place

        check_place(arguments.images)
    from mjp_privacy.experiment.code import stale_choice
    from mjp_privacy.experiment.run import attack_uploads, run_experiment
    from mjp_privacy.experiment.run_folder import run_folder

    check_attacks(experiment.attacks, str(arguments.config))
    changes: dict[str, Any] = {
        "weights": arguments.weights,
        "gamma": arguments.gamma,
        "model": {
            **{name: getattr(arguments, name) for name in MODEL_OPTIONS},
            "img_size": size_of(arguments.img_size),
        },
    }
    out = arguments.out or run_folder(experiment, **changes)
    shared: dict[str, Any] = {
        **{name: getattr(arguments, name) for name in SHARED},
        "stale": stale_choice(arguments.fresh, arguments.keep),
        "engine": engine,
    }
    if arguments.uploads is not None:
        return attack_uploads(experiment, arguments.uploads, out, **shared)
    changed = with_changes(experiment, weights=arguments.weights, model=changes["model"])
    check_models(changed, "--model" if arguments.model else str(arguments.config))
    models = changed.models.values()
    for path in arguments.weights:
        if (several := sum(model.checkpoint == path for model in models)) > 1:
            print(f"note: all {several} models are made of {shown(path)}", file=sys.stderr)
    shared |= {"images": arguments.images, "labels": arguments.labels, **changes}
    return run_experiment(experiment, out=out, **shared)


def _refuse_idle_options(arguments: AttackArguments, configured: Experiment, uploads: Path) -> None:
    """Raise for options that have no effect with --uploads, because the headers decide."""
    changed = arguments.overrides
    options = {
        "images": arguments.images not in (None, configured.images),
        "weights": bool(arguments.weights),
        "labels": arguments.labels is not None,
        "gamma": arguments.gamma is not None,
        "only": bool(arguments.only),
        **{name: bool(getattr(arguments, name)) for name in MODEL_OPTIONS},
        "client": changed.client != configured.client,
        "dtypes": changed.dtypes != configured.dtypes,
        "data-is-papers": changed.data_is_papers != configured.data_is_papers,
    }
    if idle := [name for name, is_given in options.items() if is_given]:
        raise UserError(
            f"--{idle[0].replace('_', '-')} says nothing of recorded uploads: their headers state "
            "pictures, precision, weights, model, labels, gamma and the client's recipe. Leave it "
            f"out, or correct the headers in {uploads}."
        )


def _parse(argv: list[str], usage: Usage, experiment: Experiment) -> AttackArguments:
    defaults = Overrides(
        **{f.name: getattr(experiment, f.name) for f in dataclasses.fields(Overrides)}
    )
    default = AttackArguments(config=tyro.MISSING, overrides=defaults, images=experiment.images)
    return usage.parse(AttackArguments, argv, default, both_ways=True)


def _config_in(argv: Sequence[str]) -> str | None:
    """The config that the command line names, found before it is parsed: the config's values are
    the defaults of its options."""
    for before, word in zip(["", *argv], argv, strict=False):
        if word.startswith("-") or before == "--engine":
            continue
        path = stock_config(word)
        if path.is_file() and path.suffix in SUFFIXES:
            return word
    return None
