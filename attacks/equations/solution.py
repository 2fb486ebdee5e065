"""A solved patch system as what an attack returns: pictures, named masks and diagnostics."""

from __future__ import annotations

from torch import Tensor

from attacks.equations.least_squares import condition_and_rank
from attacks.equations.patch_system import PatchSystem
from attacks.equations.pictures import per_image, pictures
from mjp_privacy.interfaces import AttackerView, Reconstruction


def solution(
    view: AttackerView, system: PatchSystem, patches: Tensor, values: Tensor
) -> Reconstruction:
    """Solved patches (n, N, p) as pictures, with the system's condition and rank.

    values: the singular values of the system's rows
    """
    facts = condition_and_rank(system.rows, view.updates[0].dtype, values)
    return Reconstruction(
        pictures(view, patches),
        mask=per_image(view, system.hidden),
        diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
    )
