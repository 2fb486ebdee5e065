"""Images: opening, labelling, choosing, decoding and resizing them.

The names are imported when first used: what a command says about itself needs no decoder.
"""

from typing import TYPE_CHECKING

from mjp_privacy.core.registry import imported_on_use

if TYPE_CHECKING:
    from mjp_privacy.data.decoding import ImageError as ImageError
    from mjp_privacy.data.images import ImageRecord as ImageRecord
    from mjp_privacy.data.images import ImageSource as ImageSource
    from mjp_privacy.data.images import Preprocessing as Preprocessing
    from mjp_privacy.data.images import readable_subset as readable_subset
    from mjp_privacy.data.images import spread_subset as spread_subset
    from mjp_privacy.data.made import EmbeddedSource as EmbeddedSource
    from mjp_privacy.data.made import embedded_images as embedded_images
    from mjp_privacy.data.opening import LoadedImage as LoadedImage
    from mjp_privacy.data.opening import load_images as load_images
    from mjp_privacy.data.opening import open_images as open_images

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
        "EmbeddedSource": "mjp_privacy.data.made",
        "ImageError": "mjp_privacy.data.decoding",
        "ImageRecord": "mjp_privacy.data.images",
        "ImageSource": "mjp_privacy.data.images",
        "LoadedImage": "mjp_privacy.data.opening",
        "Preprocessing": "mjp_privacy.data.images",
        "embedded_images": "mjp_privacy.data.made",
        "load_images": "mjp_privacy.data.opening",
        "open_images": "mjp_privacy.data.opening",
        "readable_subset": "mjp_privacy.data.images",
        "spread_subset": "mjp_privacy.data.images",
    },
)
