"""POST /infill: llama.cpp's path for editors that complete code at the cursor.

Source: tools/server/README.md of llama.cpp.
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...core import FinishReason
from ...outputs import Result
from ...session.output_processor import OutputProcessor
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.generation import Generation
from ..fields.checks import refuse
from ..fields.grammar import ConstraintFields, constraint, start_answers
from ..fields.prompt import fitted, infill_prompt
from ..fields.sampling import UNLIMITED, sampling_params
from ..http import sse
from ..http.replies import Events, Reply, json_body
from ..registry.served import ServedModel
from .types import PromptProgress, Timings, progress_of, timings_of, usage_log, usage_of

DEFAULT_MAX_TOKENS = 128
MAX_FILES = 256
SAMPLERS = frozenset(  # of the usual order, which is that of this server
    ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
) | {"infill"}


class ExtraFile(msgspec.Struct, kw_only=True):
    """Another file of the project."""

    filename: str = "file"
    text: str = ""


class InfillRequest(ConstraintFields, kw_only=True):
    """Code before and after the cursor; `prompt` is what was typed last, after the prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    samplers: list[str] | None = None
    logprobs: Any = None
    top_logprobs: Any = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for fields that would change the answer."""
        samplers, self.samplers = self.samplers, None
        super().refuse()
        if not SAMPLERS.issuperset(samplers or ()):
            refuse("samplers", samplers)
        refuse("n", self.n, (1,))
        refuse("logprobs", self.logprobs, (False, 0))
        refuse("top_logprobs", self.top_logprobs, (0,))


class InfillAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The code at the cursor, or a piece of it; the last piece has what follows `stop`."""

    content: str
    stop: bool
    model: str = ""
    stop_type: str = ""  # eos, limit or word
    stopping_word: str | None = None
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None  # of pieces on request


async def infill(call: Call, body: InfillRequest) -> Reply:
    """Fill the gap between two texts."""
    body.prepare()
    model = await call.model(body.model)
    answer = await call.in_worker(_read, model, body)
    generation = call.generate(model, [answer])
    if body.stream:
        return Events(_events(call, generation))
    (result,) = await generation.results()
    text = "" if body.max_tokens == 0 else result.text
    return json_body(_last(call, generation, result, text))


def _read(model: ServedModel, body: InfillRequest) -> OutputProcessor:
    """The answer to be generated. Takes a while."""
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    prefix = body.input_prefix + (body.prompt or "")
    prompt = infill_prompt(model, prefix, body.input_suffix, files=files)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    max_tokens = None if limit == UNLIMITED else max(limit, 1)  # 0 fills the cache alone
    params = sampling_params(body, model, max_tokens=max_tokens, logprobs=None)
    fitting = fitted(model, params, len(prompt.ids), param="prompt")
    asked = constraint(body)
    (answer,) = start_answers(
        model, body, prompt.ids, fitting, asked, continues=True, reasons=False
    )
    answer.request.stop_ids |= prompt.end_ids
    answer.request.reports_prompt = body.wants_progress
    return answer


async def _events(call: Call, generation: Generation) -> AsyncIterator[bytes]:
    call.log["stream"] = True
    async for steps in generation.steps():
        frames = []
        for step in steps:
            if step.event.prompt_tokens:
                progress = progress_of(generation, step)
                frames.append(InfillAnswer(content="", stop=False, prompt_progress=progress))
            elif step.delta.result is not None:
                frames.append(_last(call, generation, step.delta.result, step.delta.text))
            elif step.delta.text:
                frames.append(InfillAnswer(content=step.delta.text, stop=False))
        if frames or not steps:
            yield b"".join(map(sse.data, frames)) or sse.KEEP_ALIVE


def _last(call: Call, generation: Generation, result: Result, text: str) -> InfillAnswer:
    (answer,) = generation.answers
    word = answer.stop_match
    limit = result.finish_reason is FinishReason.LENGTH
    call.log.update(usage_log(usage_of(generation), [str(result.finish_reason)]))
    return InfillAnswer(
        content=text,
        stop=True,
        model=generation.model.name,
        stop_type="limit" if limit else "eos" if word is None else "word",
        stopping_word=word or "",
        tokens_predicted=len(result.token_ids),
        tokens_evaluated=result.prompt_tokens,
        tokens_cached=result.cached_tokens,
        timings=timings_of(result),
    )


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/infill",
        handler=infill,
        summary="Complete code at the cursor (llama.cpp's form).",
        body=InfillRequest,
        answer=InfillAnswer,
    ),
)
