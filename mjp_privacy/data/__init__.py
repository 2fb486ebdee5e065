"""Images: opening, labelling, choosing, decoding and resizing them.

The names are imported when first used: what a command says about itself needs no decoder.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from mjp_privacy.data.decoding import ImageError as ImageError
    from mjp_privacy.data.embedded import EmbeddedSource as EmbeddedSource
    from mjp_privacy.data.embedded import embedded_images as embedded_images
    from mjp_privacy.data.images import LoadedImage as LoadedImage
    from mjp_privacy.data.images import load_images as load_images
    from mjp_privacy.data.images import open_images as open_images
    from mjp_privacy.data.source import ImageRecord as ImageRecord
    from mjp_privacy.data.source import ImageSource as ImageSource
    from mjp_privacy.data.subset import readable_subset as readable_subset
    from mjp_privacy.data.subset import spread_subset as spread_subset
    from mjp_privacy.data.transforms import Preprocessing as Preprocessing

__all__ = [
    "EmbeddedSource",
    "ImageError",
    "ImageRecord",
    "ImageSource",
    "LoadedImage",
    "Preprocessing",
    "embedded_images",
    "load_images",
    "open_images",
    "readable_subset",
    "spread_subset",
]

__getattr__ = imported_on_use(
    __name__,
    {
        "EmbeddedSource": "mjp_privacy.data.embedded",
        "ImageError": "mjp_privacy.data.decoding",
        "ImageRecord": "mjp_privacy.data.source",
        "ImageSource": "mjp_privacy.data.source",
        "LoadedImage": "mjp_privacy.data.images",
        "Preprocessing": "mjp_privacy.data.transforms",
        "embedded_images": "mjp_privacy.data.embedded",
        "load_images": "mjp_privacy.data.images",
        "open_images": "mjp_privacy.data.images",
        "readable_subset": "mjp_privacy.data.subset",
        "spread_subset": "mjp_privacy.data.subset",
    },
)
