"""One choice of a completion as it grows: steps in, pieces of text and log-probabilities out."""

from collections.abc import Sequence

from ...answer import Answer
from ...core import FinishReason
from ..calls.generation import Step
from ..registry.prompt_scores import PromptScores
from ..registry.served import ServedModel
from .completion_logprobs import CompletionLogprobs, LogprobsWriter
from .completion_prompts import Prompt
from .completion_types import CompletionChoice, CompletionRequest
from .types import finish_reason


class ChoiceWriter:
    """Writes one choice: the prompt first where it is echoed, then what is generated.

    `scores` collects the log-probabilities of the prompt, None where none were asked for.
    `silent` tells that nothing was to be generated: the one token that was is left out.
    """

    def __init__(
        self, model: ServedModel, answer: Answer, body: CompletionRequest, prompt: Prompt
    ) -> None:
        self.silent = body.max_tokens == 0
        self.scores: PromptScores | None = None
        self._echo = prompt if body.echo else None
        self._logprobs: LogprobsWriter | None = None
        if body.logprobs is not None:
            offset = 0 if body.echo else len(prompt.text)
            self._logprobs = LogprobsWriter(model.tokenizer, offset)
            if body.echo:
                self.scores = PromptScores(prompt.ids, body.logprobs)

    def write(self, index: int, step: Step) -> list[CompletionChoice]:
        """What a step becomes: nothing where its text is held back, two pieces where it ends."""
        text = self._begin()
        if not self.silent:
            text += step.delta.text
            event = step.event
            if self._logprobs is not None and event.token_id is not None and event.logprobs:
                self._logprobs.add(event.token_id, event.logprobs)
        logprobs = self._logprobs.take() if self._logprobs else None
        found = []
        if text or (logprobs is not None and logprobs.tokens):
            found.append(CompletionChoice(text=text, index=index, logprobs=logprobs))
        if step.delta.result is not None:
            reason = FinishReason.LENGTH if self.silent else step.delta.result.finish_reason
            found.append(
                CompletionChoice(text="", index=index, finish_reason=finish_reason(reason))
            )
        return found

    def _begin(self) -> str:
        """The prompt, once."""
        prompt, self._echo = self._echo, None
        if prompt is None:
            return ""
        if self._logprobs is not None and self.scores is not None:
            for token_id, found in zip(prompt.ids, self.scores.scores, strict=True):
                self._logprobs.add(token_id, found)
        return prompt.text


def merged(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """All pieces of a choice in one."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    whole = None
    if logprobs:
        whole = CompletionLogprobs(
            text_offset=[x for each in logprobs for x in each.text_offset],
            token_logprobs=[x for each in logprobs for x in each.token_logprobs],
            tokens=[x for each in logprobs for x in each.tokens],
            top_logprobs=[x for each in logprobs for x in each.top_logprobs],
        )
    return CompletionChoice(
        text="".join([piece.text for piece in pieces]),
        index=pieces[0].index,
        logprobs=whole,
        finish_reason=pieces[-1].finish_reason,
    )
