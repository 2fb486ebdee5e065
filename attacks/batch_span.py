r"""What one upload of a batch says of its pictures: all but their differences' span.

`equations.superposition` has the algebra. The row space of what the rows of the table's gradient
leave of G is the span S of the pictures' differences, N (B - 1) directions of a patch's p (and of
the patches that MJP masked). Off S all pictures of the batch are equal at each position, and the
upload gives them exactly: this part of the *mean picture* is certain, and no other part of it is,
because the same two gradients belong to other pictures too. A prior fills S.

A step's B pictures are returned as two guesses: first the most probable single picture, which is
close to the smoothest one of the batch, then, for each of the others, what the most probable mean
picture leaves for them. The order within a step means nothing. For one picture a step, and for
uploads whose errors are known, this is `masked_span`, which weighs errors.

It needs N B <= D and N (B - 1) < p. `known_share` is the share of a patch's directions in which
every picture of the batch, and so their mean, is known exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attacks.budget import image
from attacks.equations.filling import wanted
from attacks.equations.least_squares import condition_and_rank
from attacks.equations.patch_system import is_disturbed, patch_system
from attacks.equations.pictures import per_image, pictures_of
from attacks.equations.requirements import lacks_patch_system
from attacks.equations.superposition import superposed, too_many_pictures
from attacks.masked_span import MaskedSpan
from mjp_privacy.interfaces import AttackerView, Reconstruction, Refusal
from mjp_privacy.models import MJPVisionTransformer


@dataclass(frozen=True)
class BatchSpanAttack:
    """The span of one upload's batch, and a prior.

    prior  `fitted`, `stationary`, or the path of a fitted prior
    """

    prior: str = "fitted"
    name: ClassVar[str] = "batch_span"
    published: ClassVar[bool] = False
    victim: ClassVar[Literal["intact", "april_block"]] = "intact"
    uploads: ClassVar[int] = 1

    @property
    def alone(self) -> MaskedSpan:
        """The attack on one picture a step."""
        return MaskedSpan(self.prior)

    def needs(self, model: MJPVisionTransformer) -> Sequence[str]:
        """What `masked_span` needs; for batches the first two are read."""
        return self.alone.needs(model)

    def unsupported(self, view: AttackerView) -> Refusal | None:
        """Why the upload does not show the span of its batch, or None."""
        return lacks_patch_system(view) or too_many_pictures(view.model, view.updates[0].batch)

    def run(self, view: AttackerView, *, generator: torch.Generator) -> Reconstruction:
        """Two guesses for the pictures of each step, and what is certain of them."""
        update = view.updates[0]
        if update.batch == 1 or is_disturbed(update):
            return self.alone.run(view, generator=generator)
        system = patch_system(view, update)
        patches, left_open = list[Tensor](), list[int]()
        for index, hidden in enumerate(system.hidden):
            with image(index * update.batch, update.batch):
                guess = superposed(view, update, system, index, self.prior)
            patches += [wanted(view, hidden, one) for one in guess.pictures(update.batch)]
            left_open.append(len(guess.basis))
        open_directions = torch.tensor(left_open).double()
        facts = {
            **condition_and_rank(system.rows, update.dtype),
            "open_directions": open_directions,
            "known_share": 1 - open_directions / system.total.shape[-1],
        }
        return Reconstruction(
            pictures_of(view, torch.stack(patches)),
            mask=per_image(view, system.hidden),
            diagnostics={name: per_image(view, fact) for name, fact in facts.items()},
        )
