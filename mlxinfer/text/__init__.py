"""Strings to token ids and back: tokenizer, chat template, detokenizer, streams. No mlx."""

from .chat import encode_chat
from .fim import FimTokens, fim_tokens
from .reasoning import ReasoningFormat, detect_reasoning
from .stream import Detokenizer, StopMatcher, TextStream
from .template import ChatTemplate, has_calls, text_messages
from .tokenizer import Tokenizer
from .tools import (
    GENERIC,
    ToolFormat,
    ToolUse,
    detect_tools,
    generic_messages,
    tool_format,
)

__all__ = [
    "GENERIC",
    "ChatTemplate",
    "Detokenizer",
    "FimTokens",
    "ReasoningFormat",
    "StopMatcher",
    "TextStream",
    "Tokenizer",
    "ToolFormat",
    "ToolUse",
    "detect_reasoning",
    "detect_tools",
    "encode_chat",
    "fim_tokens",
    "generic_messages",
    "has_calls",
    "text_messages",
    "tool_format",
]
