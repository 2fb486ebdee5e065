"""A file of weights that is not of the model it was given for: both sides are named."""

from __future__ import annotations

from mjp_privacy.core.errors import UserError
from mjp_privacy.models.shape import Shape
from mjp_privacy.models.spec import ModelSpec

COMPARED = {"embed_dim": "width", "patch_size": "patch", "depth": "depth"}
"""What a model's name states and a file's tensors show, with the word for it."""


def check_same_model(named: ModelSpec, shape: Shape, source: str) -> None:
    """Raise a UserError where a file's tensors show another architecture than its model's name.

    named   the spec of the name, before anything was read off the file
    source  the file's name

    A model without a name has whatever architecture the file has, so nothing is compared.
    """
    stated = {key: getattr(named, key) for key in COMPARED}
    differs = [
        key for key, value in stated.items() if value is not None and value != getattr(shape, key)
    ]
    if named.name == "custom" or not differs:
        return
    of_file = ", ".join(f"{COMPARED[key]} {getattr(shape, key)}" for key in differs)
    of_name = ", ".join(f"{COMPARED[key]} {stated[key]}" for key in differs)
    raise UserError(
        f"{source}: {of_file}; {named.name}: {of_name}. Expected weights of the model that is "
        "named. Give those, or leave the name and its sizes out, so that they are read off the "
        "file: mjp attack own --weights FILE --images DIR."
    )
