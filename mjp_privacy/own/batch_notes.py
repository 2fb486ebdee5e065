"""What to know of the attacks that were run on uploads of batches."""

from __future__ import annotations

from collections.abc import Collection

from attacks import traits_of

OF_ATTACKS = {
    "shared_picture": "shared_picture finds the pictures that uploads share",
    "layer_span": "layer_span searches one upload for its pictures, and marks those that it found",
    "batch_lattice": "batch_lattice finds 8-bit pictures by the lattice of their differences, and "
    "marks those that it verified",
    "batch_span": "batch_span returns two guesses for the pictures of a step, from what the upload "
    "says of all of them alike",
}


def batch_notes(batch: int, uploads: int, ran: Collection[str]) -> tuple[str, ...]:
    """One note for batches, none for single images.

    batch_notes(4, 1, ["patch_gradient"])   # "batch 4: closed forms return mixtures of ..."
    """
    said = [text for name, text in OF_ATTACKS.items() if name in ran]
    optimised = any("steps" in traits_of(name) for name in ran)
    if any(name not in OF_ATTACKS and "steps" not in traits_of(name) for name in ran):
        said.append(
            f"{'other ' if said else ''}closed forms return mixtures of the "
            f"{'step' if uploads == 1 else 'first step'}'s pictures, so their low scores are no "
            "evidence of safety"
        )
    if uploads == 1 and not optimised:
        said.append("attacks=['inverting_gradients'] matches the gradient instead, in minutes")
    return (f"batch {batch}: {'; '.join(said)}",) if batch > 1 and said else ()
