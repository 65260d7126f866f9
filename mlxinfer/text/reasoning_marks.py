"""Which marks a model puts around its reasoning: known ones, or those that its template writes."""

import re

from .reasoning import HARMONY, ReasoningFormat
from .samples import PLAIN, THOUGHT, samples_of
from .template import ChatTemplate
from .tokenizer import Tokenizer

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)
_ANSWERS = (  # around the answer after a thought: Granite 3.3 and ERNIE 4.5, Hunyuan
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
)
_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format that the tokenizer's tokens or chat template show, None for none.

    Where no known mark is found, a conversation with a thought is rendered: what stands before and
    after the thought are its marks.
    """
    if all(tokenizer.piece_to_id(mark) is not None for mark in HARMONY if "con" not in mark):
        return ReasoningFormat("", "", harmony=True)
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    added = {token.content for token in tokenizer.added_tokens.values()}
    for start, end in TAGS:
        in_tokens = end in added and any(start.startswith(token) for token in added)
        in_template = any(start in source and end in source for source in sources)
        if in_tokens or in_template:
            return ReasoningFormat(start, end, answer=_answer_marks(added, "".join(sources)))
    return None if tokenizer.template is None else written_marks(tokenizer.template)


def _answer_marks(added: set[str], sources: str) -> tuple[str, str]:
    """Return the marks around the answer that tokens or templates show, ("", "") for none."""
    for begin, end in _ANSWERS:
        if {begin, end} <= added or (begin in sources and end in sources):
            return begin, end
    return "", ""


def written_marks(template: ChatTemplate) -> ReasoningFormat | None:
    """Return the marks that a template writes around a thought, None where it writes none.

    A mark is one word between angle or square brackets, right beside the thought and nowhere else.
    """
    if not any(field in source for source in template.sources.values() for field in _FIELDS):
        return None
    text = samples_of(template)["thought"] or ""
    before, found, rest = text.partition(THOUGHT)
    after, answered, _ = rest.partition(PLAIN)
    start, end = _MARK.findall(before.rstrip()), _MARK.findall(after)
    if not (found and answered and start and end):
        return None
    beside = before.rstrip().endswith(start[-1]) and after.lstrip().startswith(end[0])
    if beside and text.count(start[-1]) == text.count(end[0]) == 1:
        return ReasoningFormat(start[-1], end[0])
    return None
