"""Waits for a step that MJP's recipe leaves unshuffled, and solves that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from attacks.equations.least_squares import minimum_norm_solve
from attacks.equations.patch_system import PatchSystem, patch_system
from attacks.equations.pictures import per_image
from attacks.equations.requirements import check_uploads, lacks_patch_system, needs_patch_system
from attacks.equations.solution import solution
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class PlainStep:
    """The first upload in which nothing was masked, solved as `patch_gradient` does.

    MJP's own recipe leaves half of the training steps unshuffled. The upload of such a step has no
    zero row in pos_embed.grad, so anybody can recognise it. A picture that was masked in every
    upload seen has no reconstruction.
    """

    uploads: Annotated[int, Field(ge=1, le=10_000)] = 4
    name: ClassVar[str] = "plain_step"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"

    def __post_init__(self) -> None:
        check_uploads(self.name, self.uploads)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and the patch embedding."""
        return needs_patch_system(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the uploads give no linear system that determines the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve each picture's first unmasked upload; `plain_upload` is its number, 0 for none."""
        systems = [patch_system(view, update) for update in view.updates]
        plain = torch.stack([~system.hidden.any(-1) for system in systems])  # (R, n)
        first_plain = plain.int().argmax(0)
        steps = torch.arange(plain.shape[1])
        rows = torch.stack([s.rows for s in systems])[first_plain, steps]
        total = torch.stack([s.total for s in systems])[first_plain, steps]
        chosen = PatchSystem(rows, total, torch.zeros_like(systems[0].hidden))
        solved = solution(view, chosen, *minimum_norm_solve(rows, total))
        reason = f"patches were masked in every one of the uploads seen ({len(systems)})"
        never_plain = per_image(view, ~plain.any(0)).nonzero().flatten().tolist()
        number = per_image(view, torch.where(plain.any(0), first_plain + 1, 0)).double()
        return Reconstruction(
            solved.images,
            diagnostics={**solved.diagnostics, "plain_upload": number},
            inapplicable=dict.fromkeys(never_plain, reason),
        )
