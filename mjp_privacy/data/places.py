"""Whether images lie where a command looks for them: asked before torch is imported, which takes
seconds."""

from __future__ import annotations

from pathlib import Path

from mjp_privacy.data.embedded import EMBEDDED
from mjp_privacy.data.files import from_home, is_folder_or_zip
from mjp_privacy.data.flat_pictures import FLAT


def check_place(path: str | Path | None) -> None:
    """Raise the UserError of `open_images` where there is no folder or zip; what it says of an
    empty path, and the pictures that it knows by a word, are left to it."""
    text = str(path or "").strip()
    if text and text not in (EMBEDDED, FLAT):
        is_folder_or_zip(from_home(text))
