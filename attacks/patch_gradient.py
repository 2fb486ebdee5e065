r"""Patch-gradient attack: the picture from two gradients of the unmodified model.

    patch_embed.proj.weight.grad = G = A^T X   with   A = the patch rows of pos_embed.grad,

so X = lstsq(A^T, G): for each pixel of a patch, D equations in N unknowns. It applies the
long-known identity of a linear layer (gradient of the weight = gradient of the output times input)
to the patch convolution; it needs no labels and works for any blocks and any loss. Exact for batch
1 with N <= D and nothing masked. Under MJP the masked rows of A are zero, so their patches are
missing from the system, and solving it anyway spoils all patches. With batch B the rows of A are
sums over the batch; the solution is a mixture of its pictures, which is scored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from attacks.equations import PATCH_SYSTEM
from attacks.equations.patch_system import (
    lacks_patch_system,
    minimum_norm_solve,
    patch_system,
    solution,
)
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal, Usual
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class PatchGradient(Usual):
    """The patches X of A^T X = G, those of minimum norm where several solve it: G is the gradient
    of the patch embedding, A that of the position table's patch rows."""

    name: ClassVar[str] = "patch_gradient"
    traits: ClassVar[tuple[str, ...]] = ("patches",)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """Gradients of the position table and the patch embedding."""
        return PATCH_SYSTEM

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload gives no linear system that determines the patches, or None."""
        return lacks_patch_system(view)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Solve the system of the first upload."""
        system = patch_system(view, view.updates[0])
        patches, values = minimum_norm_solve(system.rows, system.total)
        return solution(view, system, patches, values)
