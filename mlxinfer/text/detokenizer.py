"""Token ids to text as they come, never half a character. Knows ids; no stops, no requests."""

from collections.abc import Callable, Iterable, Sequence

from .decoding import Step, steps_of
from .tokenizer import Tokenizer

PROMPT_TAIL = 16  # prompt tokens that can matter to the first characters of an answer


class Detokenizer:
    """Ids in, text out, for one answer: joined, exactly what `Tokenizer.decode` gives for all ids.

    Linear in the number of ids: each is looked up once and goes once through the decoder's steps.
    A decoder that has no incremental form here (CTC, WordPiece) gives its text at the end.

    Args:
        tokenizer: whose ids these are.
        skip_special_tokens: leave out control tokens, as `Tokenizer.decode` does.
        keep_ids: special ids that are written out all the same.
        prompt_ids: what came before, where the answer goes on with its text: then the space that
            decoders strip at the beginning of a text is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        keep_ids: Iterable[int] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - set(keep_ids) if skip_special_tokens else set()
        self._steps = steps_of(tokenizer.decoder_spec)
        self._held: list[int] = []  # where the decoder has no incremental form
        for token_id in prompt_ids[-PROMPT_TAIL:]:
            self.push(token_id)
        self._drain(lambda step: step.settle())
        self._before = len(self._decoded())  # characters that are the prompt's

    def push(self, token_id: int) -> str:
        """Return the text that is certain now that this token has come; often "" ."""
        if token_id in self._skipped:
            return ""
        if self._steps is None:
            self._held.append(token_id)
            return ""
        piece = self._tokenizer.id_to_piece(token_id)
        if piece is None:
            return ""
        tokens = [piece]
        for step in self._steps:
            tokens = [out for token in tokens for out in step.feed(token)]
        return "".join(tokens)

    def flush(self) -> str:
        """Return what is left; half a character comes out as U+FFFD. Push nothing after it."""
        if self._steps is None:
            text = self._decoded()[self._before :]
            self._held, self._before = [], 0
            return text
        return self._drain(lambda step: step.finish())

    def _drain(self, held_by: Callable[[Step], list[str]]) -> str:
        """What the steps hold, each one's given to those after it."""
        tokens: list[str] = []
        for step in self._steps or ():
            tokens = [out for token in tokens for out in step.feed(token)] + held_by(step)
        return "".join(tokens)

    def _decoded(self) -> str:
        """The text of what is held where the decoder has no incremental form."""
        return self._tokenizer.decode(self._held, skip_special_tokens=False) if self._held else ""
