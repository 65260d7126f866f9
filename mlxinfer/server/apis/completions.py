"""POST /v1/completions: texts and token ids to be continued, in OpenAI's form."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ...core import MAX_LOGPROBS, FinishReason
from ...errors import InvalidRequestError
from ...session.answers import Answer, Answers, AnswerStep
from ...session.inputs import TextInput
from ..call import Call
from ..http import DONE, Events, Plain, data, refuse
from ..slots import ServedModel
from .sampling import BUDGETS, REFUSED, UNLIMITED, ConstraintFields, constraint, sampling_params
from .tools import Prompts, texts_of
from .usage import FINGERPRINT, LogprobsWriter, progress_of, reuse_details, timings_of, usage_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024
MAX_ANSWERS = 1024  # prompts times n
_NO_BUDGET = dict.fromkeys(set(BUDGETS) - {"thinking_budget_tokens"}, (-1,))


class CompletionRequest(ConstraintFields, kw_only=True):
    """Texts or token ids to be continued."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, **_NO_BUDGET}

    prompt: Prompts
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # the text after the gap that the model fills
    # Of llama.cpp: "deepseek" splits reasoning off the text; only then can it be bounded.
    reasoning_format: Literal["none", "deepseek"] | None = None
    thinking_budget_tokens: Annotated[int, Meta(ge=-1)] | None = None

    @property
    def reasons(self) -> bool:
        return self.reasoning_format == "deepseek"

    def resolve(self) -> None:
        if not self.reasons:
            refuse("thinking_budget_tokens", self.thinking_budget_tokens, (-1,))
        if self.suffix:
            refuse("echo", self.echo, (False,))
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError.of("max_tokens", "is 0; that goes with echo: true.")

    @property
    def num_tokens(self) -> int | None:
        """The most tokens of an answer; None: until the context is full. Of 0 one is left out."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return None if limit == UNLIMITED else max(limit, 1)


def read(body: CompletionRequest, model: ServedModel) -> list[TextInput]:
    prompts = texts_of(body.prompt, "prompt", MAX_PROMPTS)
    count = body.n or 1
    if len(prompts) * count > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{len(prompts)} prompts times n={count} are more than {MAX_ANSWERS}.", param="prompt"
        )
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise InvalidRequestError.of("suffix", "goes with a prompt of texts.")
    budget = body.thinking_budget_tokens
    params = sampling_params(
        body,
        model,
        max_tokens=body.num_tokens,
        stop=body.stops,
        logprobs=body.logprobs,
        max_reasoning_tokens=None if budget == UNLIMITED else budget,
    )
    form = constraint(body)
    return [
        TextInput(
            prompt=prompt,
            suffix=body.suffix or None,
            params=params,
            n=count,
            constraint=form,
            cache_salt=body.cache_salt,
            id_slot=body.id_slot,
            prompt_logprobs=body.logprobs if body.echo else None,
            reasons=body.reasons,
            reports_prompt=body.wants_progress,
            place=place,
        )
        for place, prompt in prompts.items()
    ]


async def complete(call: Call, body: CompletionRequest) -> Plain | Events:
    """Continue each text."""
    model = await call.model(body.model)
    answers = await call.start(model, lambda: read(body, model))
    writers = await call.in_worker(
        lambda: [ChoiceWriter(model, answer, body) for answer in answers.answers]
    )
    writer = CompletionWriter(call, body, model, answers, writers)
    if body.stream:
        return Events(writer.frames())
    return await writer.whole()


class ChoiceWriter:
    """Writes one choice: the prompt if it is echoed, then the generated text.

    Attributes:
        silent: max_tokens is 0, so the one token that is generated is left out.
    """

    def __init__(self, model: ServedModel, answer: Answer, body: CompletionRequest) -> None:
        self.silent = body.max_tokens == 0
        self._body, self._answer = body, answer
        self._echo = ""
        self._logprobs: LogprobsWriter | None = None
        text, half = "", ""
        if body.echo or body.logprobs is not None:
            text, half = model.session.text_of(answer.prompt)
        if body.echo:
            self._echo = text + half if self.silent else text
        if body.logprobs is not None:
            self._logprobs = LogprobsWriter(model.tokenizer, 0 if body.echo else len(text))
        self._begun = False

    def write(self, step: AnswerStep) -> list[Plain]:
        """The pieces of a step: none while its text is held back, two where the answer ends."""
        index, delta, body = step.index, step.delta, self._body
        text, reasoning = self._begin(), ""
        if not self.silent:
            text, reasoning = text + delta.text, delta.reasoning
            if self._logprobs is not None and delta.token_ids and step.logprobs:
                self._logprobs.add(delta.token_ids[0], step.logprobs)
        logprobs = self._logprobs.take() if self._logprobs else None
        ids = list(delta.token_ids) if body.return_token_ids and not self.silent else []
        pieces = []
        if text or reasoning or ids or (logprobs is not None and logprobs["tokens"]):
            piece = _choice(text, index, logprobs=logprobs)
            rest = {"token_ids": ids, "reasoning_content": reasoning}
            pieces.append({**piece, **{name: value for name, value in rest.items() if value}})
        if delta.result is not None:
            reason = FinishReason.LENGTH if self.silent else delta.result.finish_reason
            last = _choice("", index, reason=str(reason))
            if body.wants_timings:
                last["timings"] = timings_of(delta.result)
            pieces.append(last)
        return pieces

    def _begin(self) -> str:
        if self._begun:
            return ""
        self._begun = True
        scores = self._answer.prompt_scores
        if self._body.echo and self._logprobs is not None and scores is not None:
            for token_id, score in zip(self._answer.prompt.ids, scores.scores, strict=True):
                self._logprobs.add(token_id, score)
        return self._echo


@dataclass(slots=True)
class CompletionWriter:
    """Writes the answers to one request: whole, or as events."""

    _call: Call
    _body: CompletionRequest
    _model: ServedModel
    _answers: Answers
    _writers: Sequence[ChoiceWriter]

    async def whole(self) -> Plain:
        pieces: list[list[Plain]] = [[] for _ in self._writers]
        async for steps in self._answers:
            for step in steps:
                pieces[step.index] += self._writers[step.index].write(step)
        choices = [merged(choice_pieces) for choice_pieces in pieces]
        return self._completion(choices, usage=self._usage())

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the pieces, the token counts if they were asked for, and [DONE]."""
        async for frames in self._call.frames(
            self._answers, self.step_frames, lambda: data(self._completion([_choice("", 0)]))
        ):
            yield frames
        counts = self._usage()
        if self._body.wants_usage:
            yield data(self._completion([], usage=counts))
        yield DONE

    def step_frames(self, step: AnswerStep) -> Iterator[bytes]:
        """The frames of a step: how far its prompt is, or the pieces of its choice."""
        if step.progress is not None:
            progress = progress_of(step.progress)
            yield data(self._completion([_choice("", step.index)], prompt_progress=progress))
            return
        for piece in self._writers[step.index].write(step):
            if not self._body.wants_usage:
                yield data(self._completion([piece]))
                continue
            counts = self._usage() if self._body.wants_running_usage else None
            yield data(self._completion([piece], usage=counts))

    def _completion(self, choices: list[Plain], **rest: Any) -> Plain:
        return {
            "id": f"cmpl-{self._call.id}",
            "object": "text_completion",
            "created": self._call.created_s,
            "model": self._model.name,
            "choices": choices,
            "system_fingerprint": FINGERPRINT,
            **rest,
        }

    def _usage(self) -> Plain:
        silent = sum(writer.silent for writer in self._writers)
        reused = reuse_details(self._call.reuse, self._body.return_cached_tokens_details)
        return usage_of(self._answers, reused, left_out=silent)


def _choice(text: str, index: int, *, logprobs: Any = None, reason: str | None = None) -> Plain:
    """An answer or a delta of it; the index of choice c of prompt p is p * n + c."""
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def merged(pieces: Sequence[Plain]) -> Plain:
    scored = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    whole = None
    if scored:
        whole = {
            name: [entry for scored_piece in scored for entry in scored_piece[name]]
            for name in scored[0]
        }
    ids = [i for piece in pieces for i in piece.get("token_ids", ())]
    text = "".join([piece["text"] for piece in pieces])
    reasoning = "".join([piece.get("reasoning_content", "") for piece in pieces])
    rest = {"token_ids": ids, "reasoning_content": reasoning}
    known = {name: value for name, value in rest.items() if value}
    return {**pieces[-1], "text": text, "logprobs": whole, **known}
