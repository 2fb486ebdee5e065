"""A seeded order of the images; the subset of a smaller limit is a prefix of that of a larger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.machine import derive_seed
from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.source import ImageRecord, ImageSource


def spread_subset(
    records: Sequence[ImageRecord], limit: int | None, seed: int
) -> tuple[ImageRecord, ...]:
    """The first `limit` records (None: all) of an order in which the classes take turns.

    First comes one image of every class, in a seeded order of the classes, then a second of every
    class, and so on. The order depends on (seed, image_id, label) alone, so it is the same on every
    machine, and limit 10 is a prefix of limit 20. Of unlabelled images the groups take turns.
    """
    _check_limit(limit)
    classes: dict[str, list[ImageRecord]] = defaultdict(list)
    for record in records:
        classes[_class_of(record)].append(record)
    order = []
    for name, members in classes.items():
        place = derive_seed("class order", seed, name)
        for turn, record in enumerate(_seeded(members, seed)):
            order.append((turn, place, record.image_id, record))
    order.sort(key=lambda entry: entry[:3])
    return tuple(record for *_, record in order)[:limit]


def readable_subset(
    source: ImageSource, records: Sequence[ImageRecord], limit: int | None, seed: int
) -> tuple[tuple[ImageRecord, ...], dict[ImageRecord, str]]:
    """`spread_subset` filled from files that are images, and why the others were passed over.

    Headers are read of as many files as it takes; without a limit none is, and all are taken.
    """
    _check_limit(limit)
    order = spread_subset(records, None, seed)
    if limit is None:
        return order, {}
    chosen: list[ImageRecord] = []
    reasons: dict[ImageRecord, str] = {}
    for record in order:
        if len(chosen) == limit:
            break
        try:
            source.check_header(record)
            chosen.append(record)
        except ImageError as error:
            reasons[record] = error.reason
    if not chosen and reasons:
        record, reason = next(iter(reasons.items()))
        raise UserError(
            f"None of the {len(reasons)} files of {source.path} is a readable image: "
            f"{record.image_id} is {reason}. Give a folder or zip of photographs."
        )
    return tuple(chosen), reasons


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise UserError(f"Expected a limit of at least 1 image, got {limit}. Leave it out for all.")


def _seeded(members: Iterable[ImageRecord], seed: int) -> list[ImageRecord]:
    return sorted(members, key=lambda record: derive_seed("image order", seed, record.image_id))


def _class_of(record: ImageRecord) -> str:
    return f"group {record.group}" if record.label is None else f"label {record.label}"
