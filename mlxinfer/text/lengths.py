"""Whether texts are far too long for a context, found without encoding all of them.

Encoding takes seconds a million characters, in a thread that cannot be interrupted. Knows
tokenizers; no contexts, no errors.
"""

from collections.abc import Callable, Iterable, Sequence

USUAL_CHARS = 8  # a token; texts with no more are encoded anyway
PIECE_CHARS = 32_768
SLACK = 2  # a text that is cut has more tokens than in one piece, by a few a cut


def far_longer(
    encode: Callable[[str], Sequence[int]], texts: Sequence[str], num_tokens: int
) -> bool:
    """Whether `texts` together have more than `num_tokens` tokens, as `encode` turns them to ids.

    False says nothing: all of them have to be encoded to be sure. True costs no more than the
    encoding of about twice `num_tokens` tokens.
    """
    if sum(map(len, texts)) <= USUAL_CHARS * num_tokens:
        return False
    count = 0
    for piece in _pieces(texts):
        count += len(encode(piece))
        if count > SLACK * num_tokens:
            return True
    return False


def _pieces(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            yield text[start : start + PIECE_CHARS]
