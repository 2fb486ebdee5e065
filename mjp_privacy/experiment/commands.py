"""The commands `mjp attack` and `mjp check`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.command import DONE, SOME_FAILED, Usage
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import DtypeName, Experiment
from mjp_privacy.experiment.config_files import check_experiment, load_experiment

if TYPE_CHECKING:
    from mjp_privacy.experiment.run import RunSummary


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
    """The images are ImageNet-1K validation images: show the difference to the paper's accuracy."""
    client: ClientConfig


@dataclass(frozen=True)
class AttackArguments:
    """Attack every image in every cell of CONFIG. Running it again does only what is missing."""

    config: tyro.conf.Positional[Path]
    """A YAML file, such as configs/table5.yaml."""
    out: Path
    """The run folder. If it holds an interrupted run, that run is continued."""
    overrides: Annotated[Overrides, tyro.conf.arg(name="")]
    images: str | None = None
    """A folder, a zip, or `embedded`: photographs every installation has."""
    weights: tuple[str, ...] = ()
    """Checkpoints: PATH for all of the config's models, or NAME=PATH for one; several can be
    given."""
    labels: Path | None = None
    """A label file; without one, labels are looked for beside the images."""
    limit: int | None = None
    """Attack only this many images: a seeded subset spread over the classes, which is part of the
    subset of any larger limit."""
    uploads: Path | None = None
    """A folder of recorded uploads to attack instead of clients simulated from the config's models
    and images."""
    gamma: float | None = None
    """Shuffle ratio of settings b and c, instead of the config's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where gradients are computed; auto takes CUDA if there is a GPU."""


@dataclass(frozen=True)
class CheckArguments:
    """Say what is wrong with recorded uploads, and which attacks apply to them."""

    folder: tyro.conf.Positional[Path]
    """The folder: NAME.safetensors and NAME.json for each upload, and weights/ beside them."""


def check(argv: list[str], usage: Usage) -> int:
    """`mjp check`: print a report on a folder of recorded uploads."""
    arguments = usage.parse(CheckArguments, argv)
    from mjp_privacy.experiment.check_uploads import check_uploads

    text, usable = check_uploads(arguments.folder)
    print(text)
    return DONE if usable else SOME_FAILED


def attack(argv: list[str], usage: Usage) -> int:
    """`mjp attack`: run an experiment, or attack recorded uploads, and print what failed."""
    if sum(a == "--weights" or a.startswith("--weights=") for a in argv) > 1:
        raise UserError(
            "--weights is given more than once, and only the last one would be used. Expected it "
            "once, followed by all checkpoints: --weights NAME=PATH NAME=PATH."
        )
    arguments = _parse(argv, usage, _experiment_of(argv, usage))
    changes = {f.name: getattr(arguments.overrides, f.name) for f in dataclasses.fields(Overrides)}
    experiment = dataclasses.replace(load_experiment(arguments.config), **changes)
    check_experiment(experiment, str(arguments.config))
    summary = _run(arguments, experiment)
    print(f"{summary.images} images in {summary.cells} cells: {summary.out}")
    if summary.inapplicable:
        print("Not applicable, each a row with its reason:")
        for line in summary.inapplicable:
            print(f"  {line}")
    print(f"Next: mjp report {summary.out} --out {summary.out / 'report'}")
    if summary.failures:
        print(
            f"{len(summary.failures)} failure(s); each is a row with its reason:", file=sys.stderr
        )
        for failure in summary.failures[:5]:
            print(f"  {failure}", file=sys.stderr)
    return SOME_FAILED if summary.failures else DONE


def _run(arguments: AttackArguments, experiment: Experiment) -> RunSummary:
    from mjp_privacy.experiment.run import attack_uploads, run_experiment

    if arguments.uploads is None:
        return run_experiment(
            experiment,
            images=arguments.images,
            out=arguments.out,
            weights=arguments.weights,
            labels=arguments.labels,
            limit=arguments.limit,
            gamma=arguments.gamma,
            device=arguments.device,
        )
    _refuse_idle_options(arguments, arguments.uploads)
    return attack_uploads(
        experiment, arguments.uploads, arguments.out, limit=arguments.limit, device=arguments.device
    )


def _refuse_idle_options(arguments: AttackArguments, uploads: Path) -> None:
    """Raise for options that have no effect with --uploads, because the headers decide."""
    configured = load_experiment(arguments.config).client
    options = {
        "weights": bool(arguments.weights),
        "labels": arguments.labels is not None,
        "gamma": arguments.gamma is not None,
        "client": arguments.overrides.client != configured,
    }
    if idle := [name for name, is_given in options.items() if is_given]:
        raise UserError(
            f"--{idle[0]} says nothing of recorded uploads: their headers state weights, labels, "
            "gamma and the client's recipe. Leave it out, or correct the headers in "
            f"{uploads}."
        )


def _parse(argv: list[str], usage: Usage, experiment: Experiment) -> AttackArguments:
    """The command line, with this experiment's values as defaults."""
    defaults = Overrides(
        **{f.name: getattr(experiment, f.name) for f in dataclasses.fields(Overrides)}
    )
    default = AttackArguments(
        config=tyro.MISSING, out=tyro.MISSING, overrides=defaults, images=experiment.images
    )
    return usage.parse(AttackArguments, argv, default, both_ways=True)


def _experiment_of(argv: list[str], usage: Usage) -> Experiment:
    """The config that the command line names, or a blank one for --help without a config."""
    blank = load_experiment(
        {"name": "none", "models": {"none": {}}, "grid": [{"models": ["none"], "settings": ["a"]}]}
    )
    if not {"-h", "--help"} & set(argv):
        return load_experiment(_parse(argv, usage, blank).config)
    named = [a for a in argv if a.endswith((".yaml", ".yml")) and Path(a).is_file()]
    return load_experiment(named[0]) if named else blank
