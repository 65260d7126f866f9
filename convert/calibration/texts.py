"""Texts for calibration and for checking, cut into sequences of token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ...errors import InvalidRequestError

Encode = Callable[[str], list[int]]

CALIBRATION_LENGTH = 128  # tokens of a sequence: many short ones show more kinds of text
SEQUENCES = 6  # more are no better: Gemma 3 270M has a KL of 0.113 with 6, 0.115 with 8
SHORT, LONG = 64, 512  # tokens: the two context lengths of the check
NUM_SHORT, NUM_LONG = 8, 1
MAX_CHECKED = SHORT * NUM_SHORT + LONG * NUM_LONG  # positions
LEAST_CHECKED = 2 * SHORT
MAX_COMPARED = 1 << 25  # logits of the check; a large vocabulary leaves fewer positions
DEFAULT = "default.txt"


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences of token ids; those of one list have one length."""

    calibration: list[list[int]]
    short: list[list[int]]
    long: list[list[int]]


def read_text(path: Path | None) -> str:
    """A text file, or the one that comes along: prose, code, JSON, sums and conversations."""
    if path is None:
        return files(__package__).joinpath(DEFAULT).read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: {error}.") from error
    if not text.strip():
        raise InvalidRequestError(f"{path} is empty; calibration needs some pages of text.")
    return text


def checked_positions(vocab_size: int) -> int:
    return min(MAX_CHECKED, max(LEAST_CHECKED, MAX_COMPARED // vocab_size))


def beginning(framed: Encode, plain: Encode) -> list[int]:
    """The tokens that a tokenizer puts before a text, such as BOS.

    Args:
        framed: encodes with the tokens that belong around a text.
        plain: encodes without them.
    """
    whole, text = framed("a"), plain("a")
    starts = (n for n in range(len(whole)) if whole[n : n + len(text)] == text)
    return whole[: next(starts, 0)]


def make_texts(
    calibration: str,
    check: str | None,
    encode: Encode,
    *,
    begin: Sequence[int] = (),
    sequences: int,
    max_context: int,
    positions: int = MAX_CHECKED,
) -> Texts:
    """Cut texts into sequences.

    Args:
        calibration: what second moments and probes are taken from.
        check: what the result is checked on; None: the last third of `calibration`, which is then
            not calibrated on.
        encode: text -> token ids, without those around it.
        begin: ids that every sequence begins with. Many models give nonsense without their BOS.
        sequences: for calibration, at most.
        positions: in all sequences of the check, at most.
    """
    ids = encode(calibration)
    if check is None:
        cut = len(ids) * 2 // 3
        ids, checked = ids[:cut], ids[cut:]
    else:
        checked = encode(check)
    limit = max_context - 1  # an engine wants room for an answer
    long = _sequences(checked, begin, min(LONG, limit, positions // 2), NUM_LONG)
    rest = checked[sum(map(len, long)) :] or checked
    short = min(SHORT, limit)
    return Texts(
        _sequences(ids, begin, min(CALIBRATION_LENGTH, limit), sequences),
        _sequences(rest, begin, short, min(NUM_SHORT, positions // 2 // short)),
        long,
    )


def _sequences(
    ids: Sequence[int], begin: Sequence[int], length: int, limit: int
) -> list[list[int]]:
    """Sequences spread evenly over a text; one of what there is, where that is less than one."""
    if len(ids) < 2:
        raise InvalidRequestError("The text for calibration is empty.", param="calibration")
    begin = begin if len(begin) < length else ()
    length = min(length - len(begin), len(ids))
    count = min(limit, len(ids) // length)
    gap = len(ids) // count
    return [[*begin, *ids[i * gap : i * gap + length]] for i in range(count)]
