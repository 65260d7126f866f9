"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's paths."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import check_token_ids
from ...errors import InvalidRequestError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..fields.checks import refuse
from ..fields.prompt import Effort
from ..fields.tools import tool_use
from ..http.replies import Reply, json_body
from ..registry.served import ServedModel
from .chat_prompt import Message, encode_conversation


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either a text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None  # of a text; default true
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    tools: list[dict[str, Any]] | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """Token ids, and the context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=1_000_000)]


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of token ids, control tokens included."""

    prompt: str


async def tokenize(call: Call, body: TokenizeRequest) -> Reply:
    """The token ids of a text or a conversation."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", param="prompt")
    model = await call.model(body.model)
    return await call.in_worker(_tokenized, model, body, call.service.config.template_kwargs)


async def detokenize(call: Call, body: DetokenizeRequest) -> Reply:
    """The text of token ids."""
    model = await call.model(body.model)
    return json_body(Detokenized(prompt=await call.in_worker(_decode, model, body.tokens)))


async def tokenizer_info(call: Call, _: None) -> Reply:
    """Special tokens and chat template of the first model, as in tokenizer_config.json."""
    model = await call.model(None)
    tokenizer = model.tokenizer
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    if tokenizer.template is not None:
        info["chat_template"] = tokenizer.template.source_for(None)
    return json_body({**info, "model_max_length": model.max_context})


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        summary="The token ids of a text or a conversation.",
        body=TokenizeRequest,
        answer=Tokenized,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        summary="The text of token ids.",
        body=DetokenizeRequest,
        answer=Detokenized,
    ),
    Endpoint(
        method="GET",
        path="/tokenizer_info",
        handler=tokenizer_info,
        summary="Special tokens and chat template of the first model.",
    ),
)


def _decode(model: ServedModel, tokens: list[int]) -> str:
    check_token_ids(tokens, model.info.vocab_size, param="tokens")
    return model.tokenizer.decode(tokens, skip_special_tokens=False)


def _tokenized(model: ServedModel, body: TokenizeRequest, allowed: frozenset[str]) -> Reply:
    ids = _encode(model, body, allowed)
    strings = (
        [model.tokenizer.id_to_piece(i) or "" for i in ids] if body.return_token_strs else UNSET
    )
    return json_body(
        Tokenized(count=len(ids), max_model_len=model.max_context, tokens=ids, token_strs=strings)
    )


def _encode(model: ServedModel, body: TokenizeRequest, allowed: frozenset[str]) -> list[int]:
    if body.messages is not None:
        use = tool_use(model, body.tools, None)
        shown = None if use is None else use.shown
        return encode_conversation(
            model, body.messages, body, allowed=allowed, tools=shown, bounded=False
        )
    refuse("tools", body.tools, ([],))
    special = True if body.add_special_tokens is None else body.add_special_tokens
    return model.tokenizer.encode(body.prompt or "", add_special_tokens=special, parse_special=True)
