"""Whether images lie where a command looks for them: asked before torch is imported, which takes
seconds."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.data.embedded import EMBEDDED
from mjp_privacy.data.files import from_home, place_of
from mjp_privacy.data.flat_pictures import FLAT


def check_place(path: str | Path | None) -> None:
    """Raise the UserError of `open_images` where there is no folder or zip. No path, an empty one
    and the words `embedded` and `flat` pass: `open_images` deals with them."""
    if path is not None and str(path).strip() and str(path) not in (EMBEDDED, FLAT):
        place_of(from_home(path))
