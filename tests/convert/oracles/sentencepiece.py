"""SentencePiece's BPE, step by step: join the neighbours with the highest score as one piece.

From the description in github.com/google/sentencepiece (src/bpe_model.cc): ties go to the leftmost
pair; what has no piece falls back to bytes. No mlxinfer.
"""

from itertools import pairwise


def pieces_of(text: str, tokens: list[str], scores: list[float], *, prefix: bool) -> list[int]:
    """The ids of a text; `prefix`: a space is put before it."""
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list(((" " if prefix else "") + text).replace(" ", "▁"))
    while True:
        result = [
            (-scores[ids[left + right]], place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in ids
        ]
        if not result:
            break
        place = min(result)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [index for part in parts for index in _ids_of(part, ids)]


def _ids_of(part: str, ids: dict[str, int]) -> list[int]:
    if part in ids:
        return [ids[part]]
    return [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
