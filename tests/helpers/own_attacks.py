"""Attacks of a test's own: one reads several uploads, some are faulty."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attacks.budget import image, spent
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.registry import Entry
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from tests.helpers.runs import MJP, tiny

SEEN: list[AttackerView] = []
WHERE = "tests.helpers.own_attacks"
ROUNDS = Entry(f"{WHERE}:Rounds", "reads R uploads and guesses grey")


class Own(Usual):
    """An attack that needs nothing of its own and always applies."""

    def needs(self, model: Any) -> Sequence[str]:
        """Nothing."""
        return ()

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """It always applies."""
        return None


@dataclass(frozen=True)
class Rounds(Own):
    """Reads R uploads and guesses grey; notes what it was shown."""

    rounds: int = 3
    inapplicable: tuple[int, ...] = ()
    breaks: bool = False  # the linear algebra of a block, not that of a single step
    fails: int = 0  # it raises with so many steps
    name: ClassVar[str] = "rounds"
    traits: ClassVar[tuple[str, ...]] = ("shared pictures",)

    @property
    def uploads(self) -> int:
        return self.rounds

    def needs(self, model: Any) -> Sequence[str]:
        return ("pos_embed",)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        SEEN.append(view)
        if len(view.updates[0].grads["pos_embed"]) == self.fails:
            raise RuntimeError(f"{self.fails} steps are too many")
        count = len(view.updates[0].grads["pos_embed"]) * view.updates[0].batch
        if self.breaks and count > view.updates[0].batch:
            raise torch.linalg.LinAlgError("no convergence")
        images = torch.full((count, 3, 32, 32), 0.5)
        where = {at: "too dark" for at in self.inapplicable if at < count}
        images[list(where)] = torch.nan
        zero = view.updates[0].grads["pos_embed"][:, 0, 1:].eq(0).all(-1)
        return Reconstruction(
            images, zero.repeat_interleave(count // len(zero), 0), None, {}, where
        )


def mjp(setting: str, *attacks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """One MJP model in one setting, in blocks of three."""
    entry = {"models": ["MJP"], "settings": [setting], "gammas": [0.5]}
    return tiny(**({"models": {"MJP": MJP}, "grid": [entry], "attacks": attacks} | changes))


def rounds(label: str | None = None, **options: Any) -> dict[str, Any]:
    return {"name": "rounds", "options": options} | ({"label": label} if label else {})


def grey(view: AttackerView) -> torch.Tensor:
    """A grey picture for each image of the view."""
    update = view.updates[0]
    count = len(update.grads["patch_embed.proj.weight"]) * update.batch
    return torch.full((count, 3, view.pixels.size, view.pixels.size), 0.5)


def raised(error: BaseException) -> Any:
    raise error


ANSWERS: dict[str, Callable[[AttackerView], Any]] = {
    "runtime": lambda view: raised(RuntimeError("sizes do not match\nat all")),
    "assertion": lambda view: raised(AssertionError()),
    "exit": lambda view: sys.exit(5),
    "user": lambda view: raised(UserError("prior 'x': expected a file")),
    "singular": lambda view: torch.linalg.inv(torch.zeros(3, 3)),
    "nothing": lambda view: None,
    "tensor": grey,
    "shape": lambda view: Reconstruction(grey(view)[:, :, :4]),
    "whole": lambda view: Reconstruction((grey(view) * 255).to(torch.uint8)),
    "complex": lambda view: Reconstruction(grey(view).to(torch.complex64)),
    "nan": lambda view: Reconstruction(grey(view) * torch.nan),
    "mask": lambda view: Reconstruction(grey(view), mask=grey(view)[:, 0, 0]),
    "permutation": lambda view: Reconstruction(
        grey(view), permutation=torch.full((len(grey(view)), view.model.grid.patches), 99)
    ),
    "diagnostics": lambda view: Reconstruction(grey(view), diagnostics={"rank": torch.ones(1, 7)}),
    "names": lambda view: Reconstruction(
        grey(view),
        diagnostics={3: grey(view)[:, 0, 0, 0]},  # type: ignore[dict-item]
    ),
    "inapplicable": lambda view: Reconstruction(grey(view), inapplicable={99: "why"}),
}


@dataclass(frozen=True)
class Faulty(Own):
    """Answers as ANSWERS says."""

    answer: str = "runtime"
    member: str = ""
    """Raise in this member of the attack instead."""
    name: ClassVar[str] = "faulty"

    def needs(self, model: Any) -> Sequence[str]:
        """What the others read."""
        return raised(ValueError("what do I need?")) if self.member == "needs" else ()

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """It always applies."""
        return raised(ValueError("do I apply?")) if self.member == "unsupported" else None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Something wrong, but for images whose first label is 2."""
        if view.labels.tolist() == [2] or self.member:
            return Reconstruction(grey(view))
        return ANSWERS[self.answer](view)


@dataclass(frozen=True)
class Slow(Own):
    """Takes this many seconds of the processor for each image of class 1, 0.001 for the others.

    looks: whether it looks at its budget, and then offers what it has
    """

    seconds: float = 3.0
    looks: bool = False
    name: ClassVar[str] = "slow"

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """A picture that is the lighter the longer it took: up to .75."""
        made = grey(view)
        for place, label in enumerate(view.labels.tolist()):
            wanted = self.seconds if label == 1 else 0.001
            with image(place):
                began = time.thread_time()
                while (took := time.thread_time() - began) < wanted:
                    if self.looks and spent():
                        break
                    torch.ones(200).sum()
                made[place] = 0.75 if took >= wanted else 0.25
        return Reconstruction(made)
