"""Images: opening, labelling, choosing, decoding and resizing them."""

from mjp_privacy.data.decoding import ImageError
from mjp_privacy.data.embedded import EmbeddedSource, embedded_images
from mjp_privacy.data.images import LoadedImage, load_images, open_images
from mjp_privacy.data.source import ImageRecord, ImageSource
from mjp_privacy.data.subset import readable_subset, spread_subset
from mjp_privacy.data.transforms import Preprocessing

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
