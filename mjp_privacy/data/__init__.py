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
    from mjp_privacy.data.images import load_images as load_images
    from mjp_privacy.data.images import open_images as open_images
    from mjp_privacy.data.images import readable_subset as readable_subset
    from mjp_privacy.data.images import spread_subset as spread_subset
    from mjp_privacy.data.made import embedded_images as embedded_images

IMAGES = (
    *("ImageRecord", "ImageSource", "Preprocessing", "load_images", "open_images"),
    *("readable_subset", "spread_subset"),
)

__getattr__ = imported_on_use(
    __name__,
    {
        "ImageError": "mjp_privacy.data.decoding",
        **dict.fromkeys(IMAGES, "mjp_privacy.data.images"),
        "embedded_images": "mjp_privacy.data.made",
    },
)
