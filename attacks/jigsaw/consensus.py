"""What several searches for the same pictures agree in, once their results lie on one another.

    lying = registered(pictures, reference, labels=labels, mask=mask, patch_size=16)

Two searches may differ in ways that an upload cannot tell, or that a search slides along, and a
mean over such results is a blur. So a result is first laid on the reference:

    pictures  of a batch that have the same label, by assignment
    patches   that were masked, among themselves, by assignment: no gradient tells their places
    shifts    by whole pixels, at most REACH each way
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from mjp_privacy.models.jigsaw import to_images, to_patches

REACH = 2  # pixels


def in_the_order_of(pictures: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """Pictures (B, C, H, W) of equal labels exchanged so that each is nearest its reference."""
    placed = pictures.clone()
    for label in labels.unique():
        same = (labels == label).nonzero().flatten()
        placed[same] = pictures[same][_matched(pictures[same], reference[same])]
    return placed


def placed_as(picture: Tensor, reference: Tensor, mask: Tensor, patch_size: int) -> Tensor:
    """A picture (C, H, W) whose masked patches (N,) are exchanged so that each is nearest that of
    the reference in its place."""
    patches, targets = (to_patches(image, patch_size) for image in (picture, reference))
    order = _matched(patches[mask], targets[mask])
    patches = patches.clone()
    patches[mask] = patches[mask][order]
    return to_images(patches, patch_size, len(picture))


def shifted_onto(picture: Tensor, reference: Tensor, reach: int = REACH) -> Tensor:
    """A picture (C, H, W) moved by the whole pixels that bring it nearest to the reference, in mean
    squared distance where both are; what moves in from outside is the reference's."""
    side, far = picture.shape[-1], torch.inf
    nearest = picture
    moves = sorted(range(-reach, reach + 1), key=abs)  # of equal distances, the smallest move
    for down in moves:
        for right in moves:
            rows, columns = (slice(max(0, by), side + min(0, by)) for by in (down, right))
            above, left = (slice(max(0, -by), side + min(0, -by)) for by in (down, right))
            moved = picture[..., above, left]
            distance = float((moved - reference[..., rows, columns]).square().mean())
            if distance < far:
                far, nearest = distance, reference.clone()
                nearest[..., rows, columns] = moved
    return nearest


def _matched(values: Tensor, targets: Tensor) -> Tensor:
    """Which of the values (k, …) goes to each target (k, …), by least squared distance in all."""
    cost = torch.cdist(targets.flatten(1).double(), values.flatten(1).double()).square()
    return torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1]).to(values.device)
