"""Attacks of somebody's own that raise, or return something else than pictures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import attacks
from attacks.budget import image, spent
from mjp_privacy.core.errors import UserError
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal

WHERE = "tests.helpers.faulty_attacks"


def grey(view: AttackerView) -> torch.Tensor:
    """A grey picture for each image of the view."""
    update = view.updates[0]
    count = len(update.grads["patch_embed.proj.weight"]) * update.batch
    return torch.full((count, 3, view.pixels.size, view.pixels.size), 0.5)


def raised(error: BaseException) -> Any:
    raise error


ANSWERS: dict[str, Callable[[AttackerView], Any]] = {
    "runtime": lambda view: raised(RuntimeError("sizes do not match\nat all")),
    "key": lambda view: raised(KeyError("no such thing")),
    "assertion": lambda view: raised(AssertionError()),
    "exit": lambda view: sys.exit(5),
    "recursion": lambda view: raised(RecursionError("too deep")),
    "user": lambda view: raised(UserError("prior 'x': expected a file")),
    "singular": lambda view: torch.linalg.inv(torch.zeros(3, 3)),
    "torch": lambda view: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "nothing": lambda view: None,
    "tensor": grey,
    "shape": lambda view: Reconstruction(grey(view)[:, :, :4]),
    "whole": lambda view: Reconstruction((grey(view) * 255).to(torch.uint8)),
    "complex": lambda view: Reconstruction(grey(view).to(torch.complex64)),
    "list": lambda view: Reconstruction(grey(view).tolist()),
    "nan": lambda view: Reconstruction(grey(view) * torch.nan),
    "mask": lambda view: Reconstruction(grey(view), mask=grey(view)[:, 0, 0]),
    "permutation": lambda view: Reconstruction(
        grey(view), permutation=torch.full((len(grey(view)), view.model.grid**2), 99)
    ),
    "diagnostics": lambda view: Reconstruction(grey(view), diagnostics={"rank": torch.ones(1, 7)}),
    "names": lambda view: Reconstruction(
        grey(view),
        diagnostics={3: grey(view)[:, 0, 0, 0]},  # type: ignore[dict-item]
    ),
    "inapplicable": lambda view: Reconstruction(grey(view), inapplicable={99: "why"}),
}


@dataclass(frozen=True)
class Faulty:
    """Answers as ANSWERS says."""

    answer: str = "runtime"
    member: str = ""
    """Raise in this member of the attack instead."""
    name: ClassVar[str] = "faulty"
    published: ClassVar[bool] = False
    victim: ClassVar[str] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: Any) -> Sequence[str]:
        """What the others read."""
        return raised(ValueError("what do I need?")) if self.member == "needs" else ()

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """It always applies."""
        return raised(ValueError("do I apply?")) if self.member == "unsupported" else None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Something wrong, but for images whose first label is 2."""
        assert view.labels is not None
        if view.labels.tolist() == [2] or self.member:
            return Reconstruction(grey(view))
        answer: Reconstruction = ANSWERS[self.answer](view)
        return answer


@dataclass(frozen=True)
class Slow:
    """Takes this many seconds of the processor for each image of class 1, 0.001 for the others.

    looks: whether it looks at its budget, and then offers what it has
    """

    seconds: float = 3.0
    looks: bool = False
    name: ClassVar[str] = "slow"
    published: ClassVar[bool] = False
    victim: ClassVar[str] = "intact"
    uploads: ClassVar[int] = 1

    def needs(self, model: Any) -> Sequence[str]:
        """Nothing of its own."""
        return ()

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """It always applies."""
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """A picture that is the lighter the longer it took: up to .75."""
        assert view.labels is not None
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


FRAMES: list[str] = []
"""The functions of this package that stood between the way in and the attack, outermost first."""
PACKAGE = Path(attacks.__file__).parents[1]


@dataclass(frozen=True)
class Frames(Faulty):
    """Grey pictures; notes who called it."""

    name: ClassVar[str] = "frames"

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Fills FRAMES."""
        FRAMES.clear()
        frame = sys._getframe(1)
        while frame.f_back is not None:
            place = Path(frame.f_code.co_filename)
            rooms = PACKAGE / "mjp_privacy", PACKAGE / "attacks"
            if any(room in place.parents for room in rooms):
                FRAMES.insert(0, frame.f_code.co_name)
            frame = frame.f_back
        return Reconstruction(grey(view))
