"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from .families import image_processor
from .load import (
    data_url,
    from_base64,
    from_data_url,
    load_image,
    open_image,
    picture_file,
    thumbnail_url,
)
from .picture import Picture, PlacedPicture, Tile
from .positions import rope_delta, rope_positions
from .processor import ImageProcessor

__all__ = [
    "ImageProcessor",
    "Picture",
    "PlacedPicture",
    "Tile",
    "data_url",
    "from_base64",
    "from_data_url",
    "image_processor",
    "load_image",
    "open_image",
    "picture_file",
    "rope_delta",
    "rope_positions",
    "thumbnail_url",
]
