"""Strings to token ids and back: tokenizer, chat template, detokenizer, streams. No mlx."""

from .chat import encode_chat
from .fim import FimTokens, fim_tokens
from .probe import TemplateFacts
from .reasoning import ReasoningFormat, detect_reasoning
from .samples import facts_of, thinking_levels
from .stream import StopMatcher, TextStream
from .template import (
    ChatTemplate,
    Content,
    ImagePart,
    around,
    count_argument_values,
    has_calls,
    joined,
    read_messages,
)
from .thinking import CLIENT_NAMES, SWITCH_NAMES, Thinking
from .tokenizer import INCOMPLETE, Tokenizer
from .tools import (
    GENERIC,
    ToolFormat,
    ToolUse,
    WrittenCall,
    detect_tools,
    generic_messages,
    tool_format,
)

__all__ = [
    "CLIENT_NAMES",
    "GENERIC",
    "INCOMPLETE",
    "SWITCH_NAMES",
    "ChatTemplate",
    "Content",
    "FimTokens",
    "ImagePart",
    "ReasoningFormat",
    "StopMatcher",
    "TemplateFacts",
    "TextStream",
    "Thinking",
    "Tokenizer",
    "ToolFormat",
    "ToolUse",
    "WrittenCall",
    "around",
    "count_argument_values",
    "detect_reasoning",
    "detect_tools",
    "encode_chat",
    "facts_of",
    "fim_tokens",
    "generic_messages",
    "has_calls",
    "joined",
    "read_messages",
    "thinking_levels",
    "tool_format",
]
