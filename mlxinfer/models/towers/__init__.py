"""Towers: the part of a model that sees. Patches of a picture in, vectors for its tokens out."""

from .tower import Features, Tower

__all__ = ["Features", "Tower"]
