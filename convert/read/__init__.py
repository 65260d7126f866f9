"""Checkpoints of every common format as one kind of source. Knows nothing of what is written."""

from .experts import expert_groups
from .open import open_source
from .source import MLXFormat, Packed, Source, TensorInfo

__all__ = ["MLXFormat", "Packed", "Source", "TensorInfo", "expert_groups", "open_source"]
