"""Server-sent events: frames of bytes. Knows the format, no API.

No frame carries an `id:`, and silence is broken by comments: empty data frames and named pings
break clients that parse every event.
"""

from typing import Any

from .replies import encode

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """An event without a name, as OpenAI's chat and completions send."""
    return b"data: " + encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """An event with a name, as Anthropic's messages and OpenAI's responses send."""
    return b"event: " + event.encode() + b"\ndata: " + encode(value) + b"\n\n"
