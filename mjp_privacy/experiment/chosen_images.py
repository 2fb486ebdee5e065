"""Which images of a folder an experiment attacks, and which files it passes over."""

from __future__ import annotations

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import ImageRecord, ImageSource, readable_subset
from mjp_privacy.experiment.block import ImageNote
from mjp_privacy.experiment.config import Experiment
from mjp_privacy.experiment.simulated import file_sha256


def chosen_images(
    source: ImageSource, experiment: Experiment, limit: int | None
) -> tuple[tuple[ImageRecord, ...], list[ImageNote]]:
    """The images that are attacked, and notes on files that are no images and were replaced.

    chosen_images(open_images("photographs"), experiment, limit=20)

    Only a limit replaces files: without one every file is taken, and one that is no image has rows
    that say so.
    """
    records = _of_classes(source, experiment)
    chosen, no_images = readable_subset(source, records, limit, experiment.seed)
    notes = [
        ImageNote(record, file_sha256(source, record), "", f"{reason}; another file replaced it")
        for record, reason in no_images.items()
    ]
    return chosen, notes


def _of_classes(source: ImageSource, experiment: Experiment) -> tuple[ImageRecord, ...]:
    """The images of the experiment's classes; an image without a label belongs to every class."""
    choice = experiment.classes
    if choice is None:
        return source.records
    chosen = tuple(r for r in source.records if r.label is None or choice.holds(r.label))
    if not chosen:
        raise UserError(
            f"None of the {len(source.records)} images of {source.path} has a class index that "
            f"leaves {', '.join(map(str, choice.remainders))} when divided by {choice.modulo} "
            "(the config's `classes`). Give images of these classes, or remove `classes`."
        )
    return chosen
