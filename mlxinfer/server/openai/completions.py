"""POST /v1/completions: plain texts and token ids to go on with."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from ...core import Grammar, SamplingParams
from ...errors import InvalidRequestError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.constraints import constraint
from ..fields.context import check_room
from ..fields.guidance import start_grammars
from ..fields.refused import refuse
from ..fields.sampling import sampling_params
from ..http import sse
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .completion_choices import ChoiceWriter, merged
from .completion_prompts import read_prompts
from .completion_types import Completion, CompletionChoice, CompletionRequest
from .types import Usage, usage_log, usage_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_ANSWERS = 1024  # prompts times n


async def complete(call: Call, body: CompletionRequest) -> Reply:
    """Go on with each prompt."""
    body.refuse()
    refuse("suffix", body.suffix, ("",))
    model = await call.model(body.model)
    prompts = await call.in_worker(read_prompts, model, body.prompt)
    params = _params(model, body)
    if len(prompts) * len(params) > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={len(params)} are more than {MAX_ANSWERS}.",
            param="prompt",
        )
    for prompt in prompts:
        check_room(model, len(prompt.ids), params[0].max_tokens, param="prompt")
    pairs = [(prompt, choice) for prompt in prompts for choice in params]
    grammars = await call.in_worker(_grammars, model, body, len(pairs))
    answers = [
        model.answer(prompt.ids, choice, continues=True, reasons=False, grammar=grammar)
        for (prompt, choice), grammar in zip(pairs, grammars, strict=True)
    ]
    writers = [
        ChoiceWriter(model, answer, body, prompt)
        for answer, (prompt, _) in zip(answers, pairs, strict=True)
    ]
    scores = [w.scores for w in writers if w.scores is not None]
    generation = call.generate(model, answers, scores=scores or None)
    made = Made(call, generation, writers, len(params))
    if body.stream:
        return Events(_events(made, body))
    return json_body(await _whole(made))


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        handler=complete,
        summary="Go on with a text.",
        body=CompletionRequest,
        answer=Completion,
    ),
)


def _params(model: ServedModel, body: CompletionRequest) -> list[SamplingParams]:
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("max_tokens is 0; that goes with echo: true.", param="max_tokens")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return sampling_params(
        body,
        model.defaults,
        max_tokens=max(max_tokens, 1),  # a token that nobody asked for is left out again
        logprobs=body.logprobs,
    )


def _grammars(model: ServedModel, body: CompletionRequest, count: int) -> list[Grammar | None]:
    return start_grammars(model, constraint(body), None, (), count, reasons=False)


@dataclass(frozen=True, slots=True)
class Made:
    """A running generation and what writes its choices."""

    call: Call
    generation: Generation
    writers: list[ChoiceWriter]
    choices_a_prompt: int

    async def pieces(self) -> AsyncIterator[list[CompletionChoice]]:
        """Yield what comes of the choices; an empty list is silence."""
        async for steps in self.generation.steps():
            found = [piece for s in steps for piece in self.writers[s.index].write(s.index, s)]
            if found or not steps:
                yield found

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
        """The counts, once all choices are complete; they go to the log too."""
        usage = usage_of(self.generation, choices_a_prompt=self.choices_a_prompt)
        silent = sum(writer.silent for writer in self.writers)
        usage.completion_tokens -= silent
        usage.total_tokens -= silent
        results = [a.result for a in self.generation.answers if a.result is not None]
        self.call.log.update(usage_log(usage, [str(r.finish_reason) for r in results]))
        return usage


async def _whole(made: Made) -> Completion:
    parts: list[list[CompletionChoice]] = [[] for _ in made.writers]
    async for pieces in made.pieces():
        for piece in pieces:
            parts[piece.index].append(piece)
    return made.completion([merged(each) for each in parts], usage=made.usage())


async def _events(made: Made, body: CompletionRequest) -> AsyncIterator[bytes]:
    usage = None if body.wants_usage else UNSET
    made.call.log["stream"] = True
    async for pieces in made.pieces():
        frames = [sse.data(made.completion([piece], usage=usage)) for piece in pieces]
        yield b"".join(frames) or sse.KEEP_ALIVE
    counts = made.usage()
    if body.wants_usage:
        yield sse.data(made.completion([], usage=counts))
    yield sse.DONE
