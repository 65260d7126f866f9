"""POST /v1/completions: texts and token ids to be continued."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from ...core import FinishReason, SamplingParams
from ...errors import InvalidRequestError
from ...session.engine_client import Step
from ...session.output_processor import OutputProcessor
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.checks import refuse
from ..fields.grammar import constraint, start_answers
from ..fields.prompt import Prompt, fitted
from ..fields.sampling import UNLIMITED, sampling_params
from ..http import sse
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .completion_types import Completion, CompletionChoice, CompletionRequest, read_prompts
from .logprobs import CompletionLogprobs, LogprobsWriter
from .types import Usage, finish_reason, progress_of, timings_of, usage_log, usage_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_ANSWERS = 1024  # prompts times n


async def complete(call: Call, body: CompletionRequest) -> Reply:
    """Continue each prompt."""
    body.prepare()
    if body.suffix:
        refuse("echo", body.echo, (False,))
    model = await call.model(body.model)
    answers, prompts = await call.in_worker(_read, model, body)
    writers = [
        ChoiceWriter(model, answer, body, prompt)
        for answer, prompt in zip(answers, prompts, strict=True)
    ]
    generation = call.generate(model, answers)
    made = RunningCompletion(call, generation, writers, body.n or 1)
    if body.stream:
        return Events(_events(made, body))
    return json_body(await _whole(made))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=complete,
        summary="Continue a text.",
        body=CompletionRequest,
        answer=Completion,
    ),
)


def _read(
    model: ServedModel, body: CompletionRequest
) -> tuple[list[OutputProcessor], list[Prompt]]:
    """The answers to be generated, and the prompt of each. Takes a while."""
    prompts = read_prompts(model, body.prompt, body.suffix)
    params, asked = _params(model, body), constraint(body)
    if len(prompts) * len(params) > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={len(params)} are more than {MAX_ANSWERS}.",
            param="prompt",
        )
    answers: list[OutputProcessor] = []
    for prompt in prompts:
        answers += start_answers(
            model,
            body,
            prompt.ids,
            fitted(model, params, len(prompt.ids), param="prompt"),
            asked,
            continues=True,
            reasons=False,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
    each = [prompt for prompt in prompts for _ in params]
    for answer, prompt in zip(answers, each, strict=True):
        answer.request.stop_ids |= prompt.end_ids
        answer.request.reports_prompt = body.wants_progress
    return answers, each


def _params(model: ServedModel, body: CompletionRequest) -> list[SamplingParams]:
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0; that goes with echo: true.", param="max_tokens")
    max_tokens: int | None = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == UNLIMITED:
        max_tokens = None
    return sampling_params(
        body,
        model,
        max_tokens=None if max_tokens is None else max(max_tokens, 1),  # that of 0 is left out
        logprobs=body.logprobs,
    )


class ChoiceWriter:
    """Writes one choice: the prompt if it is echoed, then the generated text.

    Attributes:
        silent: max_tokens is 0, so the one token that is generated is left out.
    """

    def __init__(
        self, model: ServedModel, answer: OutputProcessor, body: CompletionRequest, prompt: Prompt
    ) -> None:
        self.silent = body.max_tokens == 0
        self._timed, self._with_ids = body.wants_timings, body.return_token_ids
        self._scores = answer.prompt_scores
        self._echo = prompt if body.echo else None
        self._logprobs: LogprobsWriter | None = None
        if body.logprobs is not None:
            offset = 0 if body.echo else len(prompt.text)
            self._logprobs = LogprobsWriter(model.tokenizer, offset)

    def write(self, index: int, step: Step) -> list[CompletionChoice]:
        """The pieces of a step: none while its text is held back, two where the answer ends."""
        text = self._begin()
        if not self.silent:
            text += step.delta.text
            event = step.event
            if self._logprobs is not None and event.token_id is not None and event.logprobs:
                self._logprobs.add(event.token_id, event.logprobs)
        logprobs = self._logprobs.take() if self._logprobs else None
        ids = list(step.delta.token_ids) if self._with_ids and not self.silent else []
        found = []
        if text or ids or (logprobs is not None and logprobs.tokens):
            piece = CompletionChoice(text=text, index=index, logprobs=logprobs)
            piece.token_ids = ids or UNSET
            found.append(piece)
        if step.delta.result is not None:
            reason = FinishReason.LENGTH if self.silent else step.delta.result.finish_reason
            last = CompletionChoice(text="", index=index, finish_reason=finish_reason(reason))
            if self._timed:
                last.timings = timings_of(step.delta.result)
            found.append(last)
        return found

    def _begin(self) -> str:
        """The echoed prompt, at the first call."""
        prompt, self._echo = self._echo, None
        if prompt is None:
            return ""
        if self._logprobs is not None and self._scores is not None:
            for token_id, found in zip(prompt.ids, self._scores.scores, strict=True):
                self._logprobs.add(token_id, found)
        return prompt.text + prompt.half if self.silent else prompt.text


def merged(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """All pieces of a choice joined."""
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    whole = None
    if logprobs:
        whole = CompletionLogprobs(
            text_offset=[x for each in logprobs for x in each.text_offset],
            token_logprobs=[x for each in logprobs for x in each.token_logprobs],
            tokens=[x for each in logprobs for x in each.tokens],
            top_logprobs=[x for each in logprobs for x in each.top_logprobs],
        )
    ids = [i for piece in pieces if piece.token_ids is not UNSET for i in piece.token_ids]
    return CompletionChoice(
        text="".join([piece.text for piece in pieces]),
        index=pieces[0].index,
        logprobs=whole,
        token_ids=ids or UNSET,
        finish_reason=pieces[-1].finish_reason,
        timings=pieces[-1].timings,
    )


@dataclass(frozen=True, slots=True)
class RunningCompletion:
    """A running generation and the writers of its choices."""

    call: Call
    generation: Generation
    writers: list[ChoiceWriter]
    choices_a_prompt: int

    def pieces(self, step: Step) -> list[CompletionChoice]:
        """The pieces that a step adds to its choice."""
        return self.writers[step.index].write(step.index, step)

    def events_of(self, step: Step, body: CompletionRequest) -> list[Completion]:
        """The events of a step: how far its prompt is, or the pieces of its choice."""
        if step.event.prompt_tokens:
            nothing = CompletionChoice(text="", index=step.index)
            progress = progress_of(self.generation, step)
            return [self.completion([nothing], prompt_progress=progress)]
        usage = None if body.wants_usage else UNSET
        pieces = self.pieces(step)
        counts = self.usage() if body.wants_running_usage else usage
        return [self.completion([piece], usage=counts) for piece in pieces]

    def completion(self, choices: list[CompletionChoice], **rest: Any) -> Completion:
        """An answer or an event with these choices."""
        return Completion(
            id=f"cmpl-{self.call.id}",
            created=self.call.created_s,
            model=self.generation.model.name,
            choices=choices,
            **rest,
        )

    def usage(self) -> Usage:
        """The token counts of complete choices, which are logged too."""
        usage = usage_of(self.generation, choices_a_prompt=self.choices_a_prompt)
        silent = sum(writer.silent for writer in self.writers)
        usage.completion_tokens -= silent
        usage.total_tokens -= silent
        results = [a.result for a in self.generation.answers if a.result is not None]
        self.call.log.update(usage_log(usage, [str(r.finish_reason) for r in results]))
        return usage


async def _whole(made: RunningCompletion) -> Completion:
    parts: list[list[CompletionChoice]] = [[] for _ in made.writers]
    async for steps in made.generation.steps():
        for step in steps:
            parts[step.index] += made.pieces(step)
    return made.completion([merged(each) for each in parts], usage=made.usage())


async def _events(made: RunningCompletion, body: CompletionRequest) -> AsyncIterator[bytes]:
    made.call.log["stream"] = True
    async for steps in made.generation.steps():
        frames = [sse.data(event) for step in steps for event in made.events_of(step, body)]
        if frames or not steps:
            yield b"".join(frames) or sse.KEEP_ALIVE
    counts = made.usage()
    if body.wants_usage:
        yield sse.data(made.completion([], usage=counts))
    yield sse.DONE
