"""What `attack_gradients` returns: pictures, checks without truth, scores, and reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import unknown_name
from mjp_privacy.own.reconstructed import Reconstructed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = 1e-2
"""A residual below it is that of rounding and clipping: the picture has the uploaded gradient."""
ROUNDING = 1e-5  # of float32: residuals below it do not tell two attacks from each other
CAP = 100.0  # dB, to which a PSNR counts in means, as in the reports


@dataclass(frozen=True)
class Leak:
    """What the gradients gave away, by attack: leak.best, leak["patch_gradient"], leak.refused."""

    results: Mapping[str, Reconstructed]
    refused: Mapping[str, str]  # {attack: why it does not apply or was not run}
    labels: Tensor | None  # (m,) of the images
    label_source: str  # given, read off the gradient, or unknown
    private: Tensor | None = field(default=None, repr=False)

    def __getitem__(self, attack: str) -> Reconstructed:
        if attack in self.results:
            return self.results[attack]
        if attack in self.refused:
            raise UserError(f"{attack} has no result: {self.refused[attack]}.")
        raise unknown_name("attack", attack, [*self.results, *self.refused])

    def __iter__(self) -> Iterator[Reconstructed]:
        return iter(self.results.values())

    def __len__(self) -> int:
        return len(self.results)

    @property
    def best(self) -> Reconstructed:
        """The attack whose pictures explain the gradient best: by residual, or by misfit where the
        labels are unknown. The private images are not looked at."""
        ranked = self.ranked
        if not ranked:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise UserError(f"No attack made a picture. {reasons}.")
        return ranked[0]

    @property
    def ranked(self) -> list[Reconstructed]:
        """The attacks that made pictures, the best first; of equals, the simplest."""
        return sorted((made for made in self if made.images is not None), key=_rank)

    @property
    def scores(self) -> pd.DataFrame | None:
        """A row for each attack and image (standard variants), or None if no images were given."""
        tables = [made.scores for made in self if made.scores is not None]
        return pd.concat(tables, ignore_index=True) if tables else None

    @property
    def verdict(self) -> str:
        """What the best attack's check says, in a sentence."""
        if not self.ranked:
            return "No attack made a picture."
        best = self.best
        number = best.check
        if math.isnan(number):
            return f"{best.attack} made a picture that nothing here can check without the truth."
        name = "residual" if best.residuals is not None else "misfit"
        if number < EXPLAINED:
            return f"{best.attack}'s picture has the uploaded gradient ({name} {number:.1e})."
        return (
            f"No picture has the uploaded gradient: the nearest is {best.attack}'s ({name} "
            f"{number:.2g}). The attacks do not reach it, or mean and std, labels, batch or loss "
            "(cross entropy is assumed) are not the client's."
        )

    def __str__(self) -> str:
        ranked = self.ranked
        check = "misfit" if ranked and ranked[0].residuals is None else "residual"
        lines = [_line("attack", check, "PSNR", "exact", "seconds")]
        lines += [_described(made) for made in ranked]
        lines += [
            f"{made.attack:22} names {int(made.mask.sum())} masked positions"
            for made in self
            if made.images is None and made.mask is not None
        ]
        lines += [f"not {', '.join(n)}: {why}" for why, n in _by_reason(self.refused).items()]
        labels = "unknown" if self.labels is None else str(self.labels.tolist())
        return "\n".join([*lines, f"labels: {labels} ({self.label_source})", self.verdict])

    def show(self, path: str | Path | None = None) -> Figure:
        """A picture of all attacks, the best first, beside the original where it was given.

        leak.show("leak.png") writes it; without a path a notebook shows what is returned.
        """
        from mjp_privacy.own.picture import leak_figure

        if not self.ranked:
            raise UserError(f"There is no picture to show. {self.verdict} See .refused.")
        figure = leak_figure(self.ranked, self.private, self.verdict)
        if path is not None:
            _write(figure, Path(path))
        return figure


def _write(figure: Figure, path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"{path}: expected a folder that exists, got {path.parent}. Make it first.")
    try:
        figure.savefig(path)
    except ValueError as error:  # a suffix that matplotlib does not know
        raise UserError(f"{path.name}: {error}. Give a name such as leak.png.") from error


def _rank(made: Reconstructed) -> float:
    return math.inf if math.isnan(made.check) else max(made.check, ROUNDING)


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    attacks: dict[str, list[str]] = {}
    for name, reason in refused.items():
        attacks.setdefault(reason, []).append(name)
    return attacks


def _described(made: Reconstructed) -> str:
    number = "–" if math.isnan(made.check) else f"{made.check:.1e}"
    if made.scores is None:
        return _line(made.attack, number, "–", "–", f"{made.seconds:.2f}")
    psnr = made.scores["psnr"].clip(upper=CAP).mean()
    exact = f"{int(made.scores['exact'].sum())} of {len(made.scores)}"
    return _line(made.attack, number, f"{psnr:.1f}", exact, f"{made.seconds:.2f}")


def _line(*cells: str) -> str:
    name, *numbers = cells
    return f"{name:22}" + "".join(f"{number:>10}" for number in numbers)
