"""The two commands, `run_attack.py` and `report.py`, over the public functions."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mjp_privacy.client.config import ClientConfig
from mjp_privacy.core.command import DONE, SOME_FAILED, kindly
from mjp_privacy.core.errors import UserError
from mjp_privacy.experiment.config import DtypeName, Experiment
from mjp_privacy.experiment.config_files import check_experiment, load_experiment

if TYPE_CHECKING:
    from mjp_privacy.experiment.run import RunSummary


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Fields of the config; what is not given is the file's."""

    seed: int
    """Seed of the puzzle, the subset and every other choice."""
    block: int
    """Images per block of work; part of the numbers (float32 APRIL moves with the batch)."""
    dtypes: tuple[DtypeName, ...]
    """Precisions of the client's gradient."""
    data_is_papers: bool
    """The images are ImageNet-1K validation images: show the accuracy difference to the paper."""
    client: ClientConfig


@dataclasses.dataclass(frozen=True)
class AttackArguments:
    """Attack every image in every cell of CONFIG; the same command again goes on."""

    config: tyro.conf.Positional[Path]
    """A YAML file, such as configs/table5.yaml."""
    out: Path
    """The run folder; given again, the run goes on or is complete."""
    overrides: Annotated[Overrides, tyro.conf.arg(name="")]
    images: str | None = None
    """A folder, a zip, or `embedded`: photographs every installation has."""
    weights: tuple[str, ...] = ()
    """Checkpoints: PATH for all of the config's models, or NAME=PATH, several at will."""
    labels: Path | None = None
    """A label file; without one labels are looked for beside the images."""
    limit: int | None = None
    """A seeded subset spread over the classes; a smaller limit is part of a larger one."""
    uploads: Path | None = None
    """A folder of recorded uploads: attack these, in place of clients made from the config's
    models and images."""
    gamma: float | None = None
    """Shuffle ratio of settings b and c, in place of the config's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where gradients are made; auto takes CUDA if there is one."""


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Tables, samples and pictures from finished or half-finished runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, the --out of run_attack.py."""
    out: Path
    """Where table.md, table.csv, table.tex, table.html, samples.csv and pictures go."""


def run_attack(argv: Sequence[str] | None = None) -> int:
    """Entry point of run_attack.py."""
    return kindly(_attack, list(sys.argv[1:] if argv is None else argv))


def report(argv: Sequence[str] | None = None) -> int:
    """Entry point of report.py."""
    return kindly(_report, list(sys.argv[1:] if argv is None else argv))


def _attack(argv: list[str]) -> int:
    if sum(a == "--weights" or a.startswith("--weights=") for a in argv) > 1:
        raise UserError(
            "--weights is given more than once, and only the last would count. Expected one with "
            "all checkpoints behind it: --weights NAME=PATH NAME=PATH."
        )
    arguments = _parse(argv, _experiment_of(argv))
    given = {f.name: getattr(arguments.overrides, f.name) for f in dataclasses.fields(Overrides)}
    experiment = dataclasses.replace(load_experiment(arguments.config), **given)
    check_experiment(experiment, str(arguments.config))
    summary = _run(arguments, experiment)
    print(f"{summary.images} images in {summary.cells} cells: {summary.out}")
    print(f"Next: python report.py {summary.out} --out {summary.out / 'report'}")
    if summary.failures:
        print(
            f"{len(summary.failures)} failure(s); each is a row with its reason:", file=sys.stderr
        )
        for failure in summary.failures[:5]:
            print(f"  {failure}", file=sys.stderr)
    return SOME_FAILED if summary.failures else DONE


def _run(arguments: AttackArguments, experiment: Experiment) -> RunSummary:
    if arguments.uploads is None:
        from mjp_privacy.experiment.run import run_experiment

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
    configured = load_experiment(arguments.config).client
    changed = arguments.overrides.client != configured or None
    unused = {"weights": arguments.weights, "labels": arguments.labels, "gamma": arguments.gamma}
    unused["client"] = changed
    if idle := [name for name, value in unused.items() if value not in (None, ())]:
        raise UserError(
            f"--{idle[0]} says nothing of recorded uploads: their headers name weights, labels, "
            "gamma and the client's recipe. Leave it out, or correct the headers in "
            f"{arguments.uploads}."
        )
    from mjp_privacy.experiment.run import attack_uploads

    return attack_uploads(
        experiment,
        arguments.uploads,
        arguments.out,
        limit=arguments.limit,
        device=arguments.device,
    )


def _parse(argv: list[str], experiment: Experiment) -> AttackArguments:
    """The command line, with the experiment's values as defaults."""
    defaults = Overrides(
        **{f.name: getattr(experiment, f.name) for f in dataclasses.fields(Overrides)}
    )
    return tyro.cli(
        AttackArguments,
        args=argv,
        prog="run_attack.py",
        default=AttackArguments(
            config=tyro.MISSING, out=tyro.MISSING, overrides=defaults, images=experiment.images
        ),
    )


def _experiment_of(argv: list[str]) -> Experiment:
    """The config named on the command line, so that its values are the defaults."""
    empty: dict[str, object] = {"name": "none", "models": {"none": {}}}
    blank = load_experiment({**empty, "grid": [{"models": ["none"], "settings": ["a"]}]})
    if not {"-h", "--help"} & set(argv):
        return load_experiment(_parse(argv, blank).config)
    named = [a for a in argv if a.endswith((".yaml", ".yml")) and Path(a).is_file()]
    return load_experiment(named[0]) if named else blank


def _report(argv: list[str]) -> int:
    arguments = tyro.cli(ReportArguments, args=argv, prog="report.py")
    from mjp_privacy.report import write_report

    summary = write_report(arguments.runs, arguments.out)
    print(summary.console)
    if summary.not_run:
        print(f"UNFINISHED: {summary.not_run} images of all lines were not run", file=sys.stderr)
    return DONE
