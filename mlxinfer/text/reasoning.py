"""How models mark their reasoning, and which way a model uses. Knows tags; does no splitting."""

from dataclasses import dataclass

from .splitters import HARMONY, HARMONY_ENDS, HarmonySplitter, Splitter, TagSplitter
from .tokenizer import Tokenizer

_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning: between two tags, or (`harmony`) by channels."""

    start: str = "<think>"
    end: str = "</think>"
    harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that this format looks for, special tokens or not."""
        return (*HARMONY, *HARMONY_ENDS) if self.harmony else (self.start, self.end)

    def splitter(self, prompt_tail: str = "") -> Splitter:
        """Return a splitter for an answer to a prompt that ends so, control tokens included."""
        if not self.harmony:
            opened = prompt_tail.rstrip().endswith(self.start)
            return TagSplitter(self.start, self.end, opened=opened)
        harmony = HarmonySplitter()
        _, header, rest = prompt_tail.rpartition("<|start|>assistant")
        if header:
            harmony.push(rest)
        return harmony


def detect_reasoning(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format that the tokenizer's tokens or its chat template show, None if none."""
    if all(tokenizer.piece_to_id(mark) is not None for mark in HARMONY if "con" not in mark):
        return ReasoningFormat("", "", harmony=True)
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    added = {token.content for token in tokenizer.added_tokens.values()}
    for start, end in _TAGS:
        in_tokens = end in added and any(start.startswith(token) for token in added)
        in_template = any(start in source and end in source for source in sources)
        if in_tokens or in_template:
            return ReasoningFormat(start, end)
    return None
