"""How vocabularies spell bytes and spaces. Knows single tokens; no ids and no sequences."""

import re
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_of_fallback(piece: str) -> int | None:
    """Return the byte that a piece such as `<0xE2>` stands for, None for any other piece."""
    found = _FALLBACK.fullmatch(piece)
    return int(found.group(1), 16) if found else None


def piece_bytes(piece: str, decoder: dict[str, Any] | None) -> bytes:
    """Return the bytes of a token in the middle of a text, as the decoder with this spec has it."""
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    kinds = {part.get("type"): part for part in parts}
    if "ByteLevel" in kinds and all(char in BYTE_OF for char in piece):
        return bytes(BYTE_OF[char] for char in piece)
    byte = byte_of_fallback(piece) if "ByteFallback" in kinds else None
    if byte is not None:
        return bytes([byte])
    if "Metaspace" in kinds:
        piece = piece.replace(kinds["Metaspace"]["replacement"], " ")
    for part in parts:
        if part.get("type") == "Replace" and "String" in part["pattern"]:
            piece = piece.replace(part["pattern"]["String"], part["content"])
    return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return {character: byte} of GPT-2: printable bytes are themselves, the others U+0100 and up.

    Source: Radford et al. 2019, bytes_to_unicode.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
