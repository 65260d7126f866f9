"""The server's name of an answer, until it has moved."""

from .answers import MAX_ATTEMPTS as MAX_ATTEMPTS
from .answers import Answer as OutputProcessor
from .answers import PromptScores as PromptScores

__all__ = ["MAX_ATTEMPTS", "OutputProcessor", "PromptScores"]
