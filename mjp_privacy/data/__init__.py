"""Images: opening, labelling, choosing, decoding and resizing them."""

from mjp_privacy.data.decoding import ImageError as ImageError
from mjp_privacy.data.images import ImageRecord as ImageRecord
from mjp_privacy.data.images import ImageSource as ImageSource
from mjp_privacy.data.images import Preprocessing as Preprocessing
from mjp_privacy.data.images import embedded_images as embedded_images
from mjp_privacy.data.images import load_images as load_images
from mjp_privacy.data.images import open_images as open_images
from mjp_privacy.data.images import readable_subset as readable_subset
from mjp_privacy.data.images import spread_subset as spread_subset
