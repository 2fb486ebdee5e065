"""An attack that reads several uploads and notes what it was shown; tests register it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from mjp_privacy.core.registry import Entry
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from tests.helpers.runs import MJP, tiny

SEEN: list[AttackerView] = []
ROUNDS = Entry("tests.helpers.rounds_attack:Rounds", "reads R uploads and guesses grey")


@dataclass(frozen=True)
class Rounds:
    """Reads R uploads and guesses grey; notes what it was shown."""

    rounds: int = 3
    inapplicable: tuple[int, ...] = ()
    breaks: bool = False  # the linear algebra of a block, not that of a single step
    name: ClassVar[str] = "rounds"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    @property
    def uploads(self) -> int:
        return self.rounds

    def needs(self, model: Any) -> Sequence[str]:
        return ("pos_embed",)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        return None

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        SEEN.append(view)
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
