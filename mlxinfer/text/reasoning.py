"""How models mark their reasoning, and the split of an answer into reasoning and visible text.

Marks are found in the text, not among the ids: a model may write `<think>` as one token or as four.
A prompt may already hold the beginning of an answer (`answer_begun`): the start tag, if the
template writes it, or a part of the reasoning or of the message that the answer continues. The text
stream and grammars start from that state.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import tokenizers

from .samples import PLAIN, THOUGHT, samples_of
from .splitters import (
    BLOCK_END,
    BLOCKS,
    GPT_OSS,
    HARMONY,
    MODEL_BLOCK,
    MUSE,
    TEXT_BLOCK,
    THOUGHT_BLOCK,
    TO_ALL,
    TO_USER,
    BlockSplitter,
    Channels,
    HarmonySplitter,
    RecipientSplitter,
    Splitter,
    TagSplitter,
    channel_of,
)
from .template import ChatTemplate
from .tokenizer import Tokenizer

_TAIL = 64  # tokens at the end of a prompt among which a start tag ends it
_ASSISTANT = "<|start|>assistant"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning: between two tags, or by channels (`harmony`).

    With `answer`, the answer after the reasoning stands between two tags of its own. `implied` and
    `final`: see TagSplitter. `channels` say how messages are marked, with `harmony`. `recipient` is
    the header of an answer without reasoning, see RecipientSplitter. With `blocks` all text is in
    blocks, see BlockSplitter. `others` are tags that prompts have instead of `start` and `end`, as
    those of K2 Horizon for less effort.
    """

    start: str = "<think>"
    end: str = "</think>"
    harmony: bool = False
    answer: tuple[str, str] = ("", "")
    implied: bool = False
    final: str = ""
    channels: Channels = GPT_OSS
    recipient: str = ""
    blocks: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that this format looks for, whether they are special tokens or not."""
        if self.harmony:
            return (*self.channels.marks, *self.channels.ends)
        if self.blocks:
            return BLOCKS
        tags = itertools.chain((self.start, self.end), *self.others)
        return (*tags, *filter(None, (*self.answer, self.final)))

    def splitter(self, prefix: str = "") -> Splitter:
        if self.recipient:
            return RecipientSplitter()
        if self.blocks:
            return BlockSplitter(opened=self.is_open(prefix))
        if not self.harmony:
            opened, thought = self.is_open(prefix), prefix.partition(self.start)[2]
            continued = opened and bool(thought.strip())
            return TagSplitter(
                self.start,
                self.end,
                self.answer,
                opened=opened,
                continued=continued,
                wrapped=bool(prefix) and prefix == self.answer[0],
                implied=self.implied and not prefix,
                final=self.final,
            )
        harmony = HarmonySplitter(self.channels)
        if prefix.startswith(_ASSISTANT):
            harmony.push(prefix.removeprefix(_ASSISTANT))
        return harmony

    def is_open(self, prefix: str) -> bool:
        if not self.harmony:
            return self.start in prefix and self.end not in prefix
        header = prefix.removesuffix("<|message|>")
        return header != prefix and channel_of(header) == "analysis"

    def is_closed(self, prefix: str) -> bool:
        """Whether the prompt holds the reasoning of this answer whole, such as an empty one."""
        if self.harmony:
            return False
        is_whole = self.start in prefix and self.end in prefix
        return is_whole or (bool(prefix) and prefix == self.answer[0])

    def is_over(self, prefix: str) -> bool:
        """Whether it is past its reasoning, because the prompt names another channel."""
        return self.harmony and prefix.endswith("<|message|>") and not self.is_open(prefix)


def answer_begun(
    tokenizer: Tokenizer, reasoning: ReasoningFormat, prompt_ids: Sequence[int]
) -> tuple[ReasoningFormat, str]:
    """Return the format of this answer, and the beginning of it at the prompt's end, "" for none.

    With tags it is the text from the last start tag on, closed or not, and the format has the tags
    that the prompt chose. With channels (harmony) it is the header of the last message.
    """
    if reasoning.harmony:
        return reasoning, _header(tokenizer, reasoning.channels, prompt_ids)
    for start, end in ((reasoning.start, reasoning.end), *reasoning.others):
        chosen = replace(reasoning, start=start, end=end)
        if prefix := _thought(tokenizer, chosen, prompt_ids):
            return chosen, prefix
    return reasoning, ""


def _header(tokenizer: Tokenizer, channels: Channels, ids: Sequence[int]) -> str:
    """Return the header of the last message with its tokens, "" where that message has ended."""
    start = _last(ids, tokenizer.piece_to_id("<|start|>"))
    message = ids[start:] if start >= 0 else ()
    if any(tokenizer.piece_to_id(mark) in message for mark in channels.ends):
        return ""
    body = tokenizer.piece_to_id("<|message|>")
    size = message.index(body) + 1 if body in message else len(message)
    return tokenizer.decode(message[:size], skip_special_tokens=False)


def _thought(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> str:
    """Return the text of the last turn from its last start tag on, "" without one."""
    turn = _last_division(tokenizer, reasoning, ids)
    if _is_header(tokenizer, ids, turn):  # all that follows is the answer's text
        text = tokenizer.decode(ids[turn + 1 :], skip_special_tokens=False)
        start = text.rfind(reasoning.start)
        return text[start:] if start >= 0 else ""
    start = _last(ids, _added_id(tokenizer, reasoning.start))
    if start > turn:
        return tokenizer.decode(ids[start:], skip_special_tokens=False)
    text = tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False).rstrip()
    begins = (reasoning.start, reasoning.answer[0])
    return next((begin for begin in begins if begin and text.endswith(begin)), "")


def _last_division(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> int:
    """Return the last position of a token that only a template writes, tags aside; or -1."""
    for place in range(len(ids) - 1, -1, -1):
        token = tokenizer.added_tokens.get(ids[place])
        if token is None or any(token.content in tag for tag in reasoning.marks):
            continue
        if token.special or _writes(tokenizer, token):
            return place
    return -1


def _writes(tokenizer: Tokenizer, token: tokenizers.AddedToken) -> bool:
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    return not token.content.isspace() and any(token.content in source for source in sources)


def _is_header(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> bool:
    """Whether the token at `place` begins a message, rather than the prompt, or ends a message."""
    if place < 0 or ids[place] in tokenizer.eos_token_ids:
        return False
    is_bos = ids[place] == tokenizer.bos_token_id  # which templates also write as a variable
    return not is_bos or (place > 0 and _writes(tokenizer, tokenizer.added_tokens[ids[place]]))


def _added_id(tokenizer: Tokenizer, tag: str) -> int | None:
    token_id = tokenizer.piece_to_id(tag)
    token = tokenizer.added_tokens.get(token_id) if token_id is not None else None
    if token is None:
        return None
    is_control = token.special or tokenizer.template is None or _writes(tokenizer, token)
    return token_id if is_control else None  # a user's text can become the others


def _last(ids: Sequence[int], wanted: int | None) -> int:
    return next((n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted), -1)


TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
_ANSWERS = (  # around the answer after a thought: Granite 3.3 and ERNIE 4.5, Hunyuan, Command
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
_FRAMES = {"<|open|>", "<|close|>", "<|sep|>"}  # Kimi K3
KIMI_K3 = ReasoningFormat(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    final="<|close|>message<|sep|>",
)
SOLAR = ReasoningFormat("<|think|>", "<|end|><|begin|>assistant", answer=("<|content|>", "<|end|>"))
INKLING = ReasoningFormat(
    THOUGHT_BLOCK, f"{BLOCK_END}{MODEL_BLOCK}", answer=(TEXT_BLOCK, BLOCK_END), blocks=True
)
_FIELDS = ("reasoning_content", "thinking", "reasoning")
_MARK = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format that the tokenizer's tokens or chat template show, None for none."""
    format = _detected(tokenizer)
    if format is None or not format.start:
        return format
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    written = "\0".join([*sources, *(t.content for t in tokenizer.added_tokens.values())])
    return replace(format, others=tuple(_other_tags(format.start, format.end, written)))


def _other_tags(start: str, end: str, written: str) -> Iterator[tuple[str, str]]:
    longer = re.compile(rf"{re.escape(start[:-1])}([\w-]+){re.escape(start[-1])}")
    for name in dict.fromkeys(longer.findall(written)):
        closing = f"{end[:-1]}{name}{end[-1]}"
        if closing in written:
            yield f"{start[:-1]}{name}{start[-1]}", closing


def _detected(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """`detect_reasoning` without other tags.

    If no known mark is found, a conversation with a thought is rendered. The marks are the texts
    before and after the thought.
    """
    sources = "\0".join(tokenizer.template.sources.values()) if tokenizer.template else ""
    added = {token.content: token for token in tokenizer.added_tokens.values()}
    template = tokenizer.template
    if all(mark in added or mark in sources for mark in HARMONY if "con" not in mark):
        return ReasoningFormat("", "", harmony=True)
    if " to=self" in sources and all(mark in sources for mark in (*MUSE.marks, *MUSE.ends)):
        return ReasoningFormat("", "", harmony=True, channels=MUSE)
    if added.keys() >= _FRAMES or all(mark in sources for mark in _FRAMES):
        return KIMI_K3
    if all(mark in sources for mark in (SOLAR.start, *SOLAR.answer)):
        return SOLAR
    if all(mark in added or mark in sources for mark in BLOCKS):
        return INKLING
    if f"{TO_ALL}{TO_USER.strip()}" in sources:
        return ReasoningFormat(recipient=TO_USER)
    in_template = [tags for tags in TAGS if all(tag in sources for tag in tags)]
    written = None if template is None or in_template else written_marks(template)
    in_tokens = [(a, b) for a, b in TAGS if b in added and any(a.startswith(t) for t in added)]
    if written is not None or not (in_template or in_tokens):
        return written
    start, end = (in_template or in_tokens)[0]
    # An answer that waits for an end mark does not stream: only where a token is that mark.
    is_plain = end in added and not added[end].special
    implied = is_plain and template is not None and writes_thoughts(template, end)
    return ReasoningFormat(start, end, answer=_answer_marks(added.keys(), sources), implied=implied)


def writes_thoughts(template: ChatTemplate, end: str) -> bool:
    """Whether a template writes a thought, with this mark after it, so that its model has them."""
    text = samples_of(template)["thought"] or ""
    return end in text.partition(THOUGHT)[2]


def _answer_marks(added: Collection[str], sources: str) -> tuple[str, str]:
    """Return the marks around the answer that tokens or templates show, ("", "") for none."""
    for begin, end in _ANSWERS:
        if (begin in added and end in added) or (begin in sources and end in sources):
            return begin, end
    return "", ""


def written_marks(template: ChatTemplate) -> ReasoningFormat | None:
    """Return the marks that a template writes around a thought, None where it writes none.

    A mark is one word between angle or square brackets, right beside the thought and nowhere else.
    """
    if not any(field in source for source in template.sources.values() for field in _FIELDS):
        return None
    text = samples_of(template)["thought"] or ""
    before, thought, rest = text.partition(THOUGHT)
    after, answered, _ = rest.partition(PLAIN)
    start, end = _MARK.findall(before.rstrip()), _MARK.findall(after)
    if not (thought and answered and start and end):
        return None
    beside = before.rstrip().endswith(start[-1]) and after.lstrip().startswith(end[0])
    if beside and text.count(start[-1]) == text.count(end[0]) == 1:
        return ReasoningFormat(start[-1], end[0])
    return None
