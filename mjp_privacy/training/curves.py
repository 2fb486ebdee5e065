"""Loss and accuracy over the epochs as in Fig. 6 of the paper, several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mjp_privacy.core.colours import colour
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_atomically
from mjp_privacy.training.journal import METRICS, read_metrics


def check_runs(runs: Sequence[Path]) -> None:
    """Raise unless every folder is a training run's."""
    for run in runs:
        if not (run / METRICS).is_file():
            raise UserError(f"No {METRICS} in {run}: expected the folder of a training run.")


def draw_curves(runs: Sequence[Path], out: Path, labels: Sequence[str] | None = None) -> Path:
    """Write curves.png into `out`: training loss on the left, validation top-1 on the right.

    labels: names of the runs in the legend; None: their folders' names.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, run in enumerate(runs):
        lines = read_metrics(run / METRICS)
        if not lines:
            continue  # a run that has only just begun
        shade = colour(number)
        label = labels[number] if labels else run.resolve().name
        left.plot(
            [line["epoch"] for line in lines],
            [line["cross_entropy"] for line in lines],
            color=shade,
            linewidth=1,
            label=label,
        )
        measured = [line for line in lines if "val_top1" in line]
        right.plot(
            [line["epoch"] for line in measured],
            [line["val_top1"] for line in measured],
            color=shade,
            marker="o",
            markersize=3,
            linewidth=1,
            label=label,
        )
    for axes, name in ((left, "training cross-entropy"), (right, "validation top-1 (%)")):
        axes.set_xlabel("epoch")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8, frameon=False)
    path = out / "curves.png"
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))
    return path
