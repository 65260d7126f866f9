"""Strings into token ids and back: tokenizer, chat template, detokenizer, streams. No mlx."""

from .chat import encode_chat
from .detokenizer import Detokenizer
from .reasoning import ReasoningFormat, detect_reasoning
from .stops import StopMatcher
from .stream import Delta, TextStream
from .template import ChatTemplate
from .tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Delta",
    "Detokenizer",
    "ReasoningFormat",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "detect_reasoning",
    "encode_chat",
]
