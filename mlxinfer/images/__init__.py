"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from .families import image_processor
from .load import from_base64, from_data_url, load_image
from .picture import Picture, PlacedPicture, Tile
from .positions import rope_delta, rope_positions
from .processor import LOW_DETAIL_TOKENS, MAX_IMAGE_TOKENS, ImageProcessor

__all__ = [
    "LOW_DETAIL_TOKENS",
    "MAX_IMAGE_TOKENS",
    "ImageProcessor",
    "Picture",
    "PlacedPicture",
    "Tile",
    "from_base64",
    "from_data_url",
    "image_processor",
    "load_image",
    "rope_delta",
    "rope_positions",
]
