"""How many parameters a Vision Transformer of some sizes has, told before any of them is made."""

from __future__ import annotations

from mjp_privacy.core.errors import UserError

MOST_PARAMETERS = 25_000_000_000
"""The largest Vision Transformer that was trained has 22 thousand millions."""
BYTES = 4  # of a parameter in float32


def check_parameters(
    name: str,
    *,
    img_size: int,
    patch_size: int,
    embed_dim: int,
    depth: int,
    num_classes: int,
    mlp_ratio: float = 4.0,
    free: int | None = None,
) -> None:
    """Raise for a network that does not fit: each size may be real, and all together not.

    free: bytes of memory that can still be taken; None: not known
    """
    block = (4 + 2 * mlp_ratio) * embed_dim**2
    rows = (img_size // patch_size) ** 2 + 3 * patch_size**2 + num_classes
    parameters = depth * block + rows * embed_dim
    needed = BYTES * parameters
    if parameters <= MOST_PARAMETERS and (free is None or needed <= free):
        return
    limit = f"{MOST_PARAMETERS:,} parameters"
    if parameters <= MOST_PARAMETERS and free is not None:
        limit = f"the {free / 1e9:.1f} GB of memory that are free"
    raise UserError(
        f"{name}: a network of these sizes has about {parameters:,.0f} parameters, that is "
        f"{needed / 1e9:,.1f} GB: expected one that fits into {limit}. Give smaller sizes."
    )
