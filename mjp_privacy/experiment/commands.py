"""`mjp attack` and `mjp check`."""

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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class CheckArguments:
    """Which attacks apply to recorded uploads, and what is wrong with them."""

    folder: tyro.conf.Positional[Path]
    """NAME.safetensors and NAME.json for each upload, weights/ beside them."""


def check(argv: list[str], usage: Usage) -> int:
    given = usage.parse(CheckArguments, argv)
    from mjp_privacy.experiment.check import check_uploads

    text, usable = check_uploads(given.folder)
    print(text)
    return DONE if usable else SOME_FAILED


def attack(argv: list[str], usage: Usage) -> int:
    if sum(a == "--weights" or a.startswith("--weights=") for a in argv) > 1:
        raise UserError(
            "--weights is given more than once, and only the last would count. Expected one with "
            "all checkpoints behind it: --weights NAME=PATH NAME=PATH."
        )
    given = _parse(argv, usage, _experiment_of(argv, usage))
    changed = {f.name: getattr(given.overrides, f.name) for f in dataclasses.fields(Overrides)}
    experiment = dataclasses.replace(load_experiment(given.config), **changed)
    check_experiment(experiment, str(given.config))
    summary = _run(given, experiment)
    print(f"{summary.images} images in {summary.cells} cells: {summary.out}")
    print(f"Next: mjp report {summary.out} --out {summary.out / 'report'}")
    if summary.failures:
        print(
            f"{len(summary.failures)} failure(s); each is a row with its reason:", file=sys.stderr
        )
        for failure in summary.failures[:5]:
            print(f"  {failure}", file=sys.stderr)
    return SOME_FAILED if summary.failures else DONE


def _run(given: AttackArguments, experiment: Experiment) -> RunSummary:
    from mjp_privacy.experiment.run import attack_uploads, run_experiment

    if given.uploads is None:
        return run_experiment(
            experiment,
            images=given.images,
            out=given.out,
            weights=given.weights,
            labels=given.labels,
            limit=given.limit,
            gamma=given.gamma,
            device=given.device,
        )
    _refuse_idle_options(given, given.uploads)
    return attack_uploads(
        experiment, given.uploads, given.out, limit=given.limit, device=given.device
    )


def _refuse_idle_options(given: AttackArguments, uploads: Path) -> None:
    """What the headers of recorded uploads say is no option of the command."""
    configured = load_experiment(given.config).client
    options = {
        "weights": bool(given.weights),
        "labels": given.labels is not None,
        "gamma": given.gamma is not None,
        "client": given.overrides.client != configured,
    }
    if idle := [name for name, is_given in options.items() if is_given]:
        raise UserError(
            f"--{idle[0]} says nothing of recorded uploads: their headers name weights, labels, "
            "gamma and the client's recipe. Leave it out, or correct the headers in "
            f"{uploads}."
        )


def _parse(argv: list[str], usage: Usage, experiment: Experiment) -> AttackArguments:
    """The command line, with the experiment's values as defaults."""
    defaults = Overrides(
        **{f.name: getattr(experiment, f.name) for f in dataclasses.fields(Overrides)}
    )
    default = AttackArguments(
        config=tyro.MISSING, out=tyro.MISSING, overrides=defaults, images=experiment.images
    )
    return usage.parse(AttackArguments, argv, default, both_ways=True)


def _experiment_of(argv: list[str], usage: Usage) -> Experiment:
    """The config named on the command line, so that its values are the defaults."""
    blank = load_experiment(
        {"name": "none", "models": {"none": {}}, "grid": [{"models": ["none"], "settings": ["a"]}]}
    )
    if not {"-h", "--help"} & set(argv):
        return load_experiment(_parse(argv, usage, blank).config)
    named = [a for a in argv if a.endswith((".yaml", ".yml")) and Path(a).is_file()]
    return load_experiment(named[0]) if named else blank
