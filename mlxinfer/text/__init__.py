"""Strings to token ids and back: tokenizer, chat template, detokenizer, streams. No mlx."""

from .chat import encode_chat
from .fim import FimTokens, fim_tokens
from .reasoning import ReasoningFormat, detect_reasoning
from .samples import TemplateFacts, facts_of, thinking_levels
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
