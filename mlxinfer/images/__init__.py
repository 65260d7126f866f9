"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from .families import image_processor, video_processor
from .load import (
    data_url,
    from_base64,
    from_data_url,
    load_image,
    open_image,
    picture_file,
    thumbnail_url,
)
from .picture import Picture, PlacedPicture, Shown, Tile, rope_delta, rope_positions
from .processor import ImageProcessor, VideoProcessor
from .video import Video, load_video

__all__ = [
    "ImageProcessor",
    "Picture",
    "PlacedPicture",
    "Shown",
    "Tile",
    "Video",
    "VideoProcessor",
    "data_url",
    "from_base64",
    "from_data_url",
    "image_processor",
    "load_image",
    "load_video",
    "open_image",
    "picture_file",
    "rope_delta",
    "rope_positions",
    "thumbnail_url",
    "video_processor",
]
