"""llama.cpp's own paths: texts and gaps to fill, and what its clients ask first.

Source of the forms: tools/server/README.md (ggml-org/llama.cpp).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from ...core import MAX_LOGPROBS, FinishReason, TokenLogprobs
from ...session.answers import Answer, AnswerStep
from ...session.inputs import TextInput
from ..call import Call
from ..http import Events, Plain, data, refuse
from ..slots import ServedModel
from .completions import MAX_PROMPTS
from .models import SAMPLING
from .sampling import REFUSED, UNLIMITED, ConstraintFields, constraint, sampling_params
from .tools import Prompts, texts_of
from .usage import FINGERPRINT, logprob_of, logprobs_of, progress_of, reuse_details, timings_of

INFILL_MAX_TOKENS = 128
MAX_FILES = 256
SAMPLERS = frozenset(  # of llama.cpp's usual order, which is that of this server
    ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
) | {"infill"}


class ExtraFile(msgspec.Struct, kw_only=True):
    """Another file of the project."""

    filename: str = "file"
    text: str = ""


READ_HERE = ("samplers", "n_probs")


class LlamaRequest(ConstraintFields, kw_only=True):
    """The fields that both paths have."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: neutral for name, neutral in REFUSED.items() if name not in READ_HERE},
        "n": (1,),
        "logprobs": (False, 0),
        "top_logprobs": (0,),
    }

    samplers: list[str] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # 0: none are scored

    def resolve(self) -> None:
        if not SAMPLERS.issuperset(self.samplers or ()):
            refuse("samplers", self.samplers)


class InfillRequest(LlamaRequest, kw_only=True):
    """Code before and after the cursor; `prompt`: the text typed last, behind the prefix."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str | None = None


class PromptRequest(LlamaRequest, kw_only=True):
    """Texts or token ids; to several of them the answer is a list."""

    prompt: Prompts


def _text(body: LlamaRequest, model: ServedModel, limit: int, **text: Any) -> TextInput:
    limit = limit if body.max_tokens is None else body.max_tokens
    max_tokens = None if limit == UNLIMITED else max(limit, 1)  # 0 fills the cache alone
    params = sampling_params(
        body, model, max_tokens=max_tokens, stop=body.stops, logprobs=body.n_probs or None
    )
    return TextInput(
        **text,
        params=params,
        constraint=constraint(body),
        cache_salt=body.cache_salt,
        id_slot=body.id_slot,
        reasons=False,
        reports_prompt=body.wants_progress,
    )


async def infill(call: Call, body: InfillRequest) -> Any:
    """Complete code at the cursor."""
    prompt = body.input_prefix + (body.prompt or "")
    files = [(file.filename, file.text) for file in body.input_extra or ()]
    text = {"prompt": prompt, "suffix": body.input_suffix, "files": files}
    whole = await _answer(call, body, INFILL_MAX_TOKENS, [text])
    return whole if isinstance(whole, Events) else whole[0]


async def complete_prompt(call: Call, body: PromptRequest) -> Any:
    """Continue texts."""
    prompts = texts_of(body.prompt, "prompt", MAX_PROMPTS)
    texts = [{"prompt": prompt, "place": place} for place, prompt in prompts.items()]
    whole = await _answer(call, body, UNLIMITED, texts)
    return whole if isinstance(whole, Events) or "prompt" not in prompts else whole[0]


async def _answer(
    call: Call, body: LlamaRequest, limit: int, texts: Sequence[Plain]
) -> list[Plain] | Events:
    model = await call.model(body.model)
    given = lambda: [_text(body, model, limit, **text) for text in texts]  # noqa: E731
    answers = await call.start(model, given)
    tokenizer = model.tokenizer

    def end(index: int, text: str) -> Plain:
        is_asked = index == 0 and body.return_cached_tokens_details
        reused = reuse_details(call.reuse, is_asked)
        return {**_end(answers.answers[index], index, text, model.name), **reused}

    def write(step: AnswerStep) -> Iterator[bytes]:
        text, result, answer = step.delta.text, step.delta.result, answers.answers[step.index]
        piece = {"index": step.index, "content": text, "stop": False}
        if step.progress is not None:
            yield data({**piece, "prompt_progress": progress_of(step.progress)})
            return
        logprobs = logprob_of(tokenizer, answer, step) if body.n_probs else []
        scores = [step.logprobs] if step.logprobs is not None else []
        if logprobs:
            piece |= _probabilities(logprobs, step.delta.token_ids, scores)
        if text or logprobs:
            yield data(piece)
        if result is not None:
            yield data(end(step.index, ""))

    if body.stream:
        idle = data({"index": 0, "content": "", "stop": False})
        return Events(call.frames(answers, write, lambda: idle))
    results = await answers.aresults()
    ends = []
    for index, (answer, result) in enumerate(zip(answers.answers, results, strict=True)):
        whole = end(index, "" if body.max_tokens == 0 else result.text)
        scored = logprobs_of(tokenizer, answer) if body.n_probs else None
        if scored is not None:
            whole |= _probabilities(scored, result.token_ids, result.logprobs or ())
        ends.append(whole)
    return ends


def _probabilities(
    entries: Sequence[Plain], ids: Sequence[int], scores: Sequence[TokenLogprobs]
) -> Plain:
    rows = []
    for entry, token_id, score in zip(entries, ids, scores, strict=False):
        top = zip(score.top, entry["top_logprobs"], strict=True)
        named = [{"id": i, **fields} for (i, _), fields in top]
        rows.append({"id": token_id, **entry, "top_logprobs": named})
    return {"completion_probabilities": rows}


def _end(answer: Answer, index: int, text: str, model: str) -> Plain:
    result, word = answer.result, answer.stop_match
    assert result is not None
    limit = result.finish_reason is FinishReason.LENGTH
    return {
        "index": index,
        "content": text,
        "stop": True,
        "model": model,
        "stop_type": "limit" if limit else "eos" if word is None else "word",
        "stopping_word": word or "",
        "tokens_predicted": len(result.token_ids),
        "tokens_evaluated": result.prompt_tokens,
        "tokens_cached": result.cached_tokens,
        "timings": timings_of(result),
    }


# -- what a client asks before it sends a prompt ------------------------------------------------


async def props(call: Call) -> Plain:
    """The model of the query, or the default one: its context, sampling, template and tokens."""
    model = await call.model(call.query.get("model"))
    if "completion" not in model.session.capabilities:
        model.session.refuse("props")
    tokenizer, limits = model.tokenizer, model.session.limits
    template = "" if tokenizer.template is None else tokenizer.template.source_for(None)
    params = {name: getattr(model.defaults, name) for name in SAMPLING}
    return {
        "default_generation_settings": {"n_ctx": limits.max_context, "params": params},
        "total_slots": limits.max_batch,
        "model_alias": model.name,
        "model_path": model.name,
        "modalities": {"vision": model.capabilities["vision"], "audio": False},
        "chat_template": template,
        **{name: tokenizer.named_tokens.get(name, "") for name in ("bos_token", "eos_token")},
        "build_info": FINGERPRINT,
    }
