"""Pictures: from a file to the patches that a tower reads, and the tokens that stand for them."""

from .picture import Picture, PlacedPicture, Tile

__all__ = ["Picture", "PlacedPicture", "Tile"]
