"""How models mark their reasoning, and which way a model uses. Knows tags; does no splitting."""

from dataclasses import dataclass

from .splitters import HARMONY, HARMONY_ENDS, HarmonySplitter, Splitter, TagSplitter, channel_of
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
_ASSISTANT = "<|start|>assistant"


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

    def splitter(self, begun: str = "") -> Splitter:
        """Return a splitter for an answer that the prompt has begun so, see begun_in."""
        if not self.harmony:
            _, opened, thought = begun.partition(self.start)
            return TagSplitter(
                self.start, self.end, opened=bool(opened), continued=bool(thought.strip())
            )
        harmony = HarmonySplitter()
        if begun.startswith(_ASSISTANT):
            harmony.push(begun.removeprefix(_ASSISTANT))
        return harmony

    def is_open(self, begun: str) -> bool:
        """Whether an answer that the prompt has begun so is within its reasoning."""
        if not self.harmony:
            return self.start in begun
        header = begun.removesuffix("<|message|>")
        return header != begun and channel_of(header) == "analysis"

    def is_over(self, begun: str) -> bool:
        """Whether it is past its reasoning: the prompt names another channel."""
        return self.harmony and begun.endswith("<|message|>") and not self.is_open(begun)


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
