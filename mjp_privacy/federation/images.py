"""A federation's training and test images: those of the trainer, or photographs at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mjp_privacy.core.errors import UserError
from mjp_privacy.data import embedded_images
from mjp_privacy.data.embedded import EMBEDDED
from mjp_privacy.federation.config import FederationConfig
from mjp_privacy.training.examples import Examples, find_examples


def federation_images(
    config: FederationConfig, data: str | Path, val: str | Path | None
) -> tuple[Examples, Examples | None]:
    """Labelled training images, and test images if there are any.

    data: any layout that the trainer takes, or `embedded`; val: the same, None: no test images
    """
    if str(data) != EMBEDDED:
        return find_examples(config.training(), Path(data), Path(val) if val else None)
    if val and str(val) != EMBEDDED:
        raise UserError(
            f"--val: expected none or {EMBEDDED} beside --data {EMBEDDED}, whose classes are its "
            f"photographs, got {val}. Leave --val out, or give both as class folders."
        )
    train = labelled_photographs(config.model.num_classes)
    return train, train if val else None


def labelled_photographs(classes: int) -> Examples:
    """20 crops of the six photographs that every installation has; a crop's class is its
    photograph. classes: how many the model tells apart."""
    source = embedded_images()
    names = sorted({str(record.group) for record in source.records})
    if classes < len(names):
        raise UserError(
            f"--data {EMBEDDED} holds {len(names)} photographs, each a class: expected "
            f"model.num_classes of {len(names)} or more, got {classes}. Set it in the config."
        )
    records = (
        replace(record, label=names.index(str(record.group)), label_source="folder")
        for record in source.records
    )
    return Examples(source, tuple(records))


def data_path(path: str | Path) -> str:
    """The path that other processes find the same images at; `embedded` is no path."""
    return EMBEDDED if str(path) == EMBEDDED else str(Path(path).resolve())
