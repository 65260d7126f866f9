"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from .picture import Picture, PlacedPicture, Tile
from .positions import rope_delta, rope_positions

__all__ = ["Picture", "PlacedPicture", "Tile", "rope_delta", "rope_positions"]
