"""Conversations with pictures in all places of a message, for models of several families.

The script that writes references and the tests that compare with them both read this.
"""

from typing import Any

import numpy as np
from PIL import Image

SIZES = ((90, 60), (64, 200), (33, 33))  # height and width of the pictures


def picture(number: int) -> Image.Image:
    """A picture of noise."""
    levels = np.random.default_rng(number).integers(0, 255, (*SIZES[number], 3), np.uint8)
    return Image.fromarray(levels)


def _user(*parts: str | int) -> dict[str, Any]:
    """Texts, and numbers of pictures."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "image": picture(part)}
            for part in parts
        ],
    }


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CHATS: dict[str, list[dict[str, Any]]] = {
    "start": [_user(0, "What is this?")],
    "end": [_user("What is this?", 1)],
    "between": [_user("Look at it\n\n", 0, "\n\nand compare", 2, "\n")],
    "two in a row": [_user(0, 1, "What?")],
    "second turn": [{"role": "user", "content": "Hi"}, _assistant("x\n"), _user(2)],
    "both turns": [_user(0, "What is this?"), _assistant("A cat."), _user("And ", 0, " ?")],
}
