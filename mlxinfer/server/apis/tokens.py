"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's paths."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from ...errors import InvalidRequestError, check_token_ids
from ..call import Call
from ..http import RequestBody, refuse
from .chat import ChatRequest, Message, pdfs_of, read
from .documents import read_pdfs
from .tools import DeclaredTools


class TokenizeRequest(ChatRequest, kw_only=True):
    """A text, or a conversation: the prompt of the chat request with the same fields."""

    # llama.cpp's name of a text
    aliases: ClassVar[Mapping[str, str]] = {**ChatRequest.aliases, "content": "prompt"}

    messages: list[Message] | None = None  # type: ignore[assignment]  # of a chat it is required
    prompt: str | None = None
    add_special_tokens: bool | None = None  # of a text; default true
    return_token_strs: bool | None = None

    def resolve(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        super().resolve()


class DetokenizeRequest(RequestBody, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=1_000_000)]


async def tokenize(call: Call, body: TokenizeRequest) -> dict[str, Any]:
    """The token ids of a text or a conversation."""
    model = await call.model(body.model)
    if body.messages is None:
        refuse("tools", body.tools, ([],))
        special = body.add_special_tokens is not False
        encode = partial(model.tokenizer.encode, add_special_tokens=special, parse_special=True)
        ids = await call.in_worker(encode, body.prompt or "")
    else:
        await read_pdfs(call, pdfs_of(body.messages))
        ids = await call.encode(model, lambda: read(body, model, DeclaredTools()))
    reply = {"count": len(ids), "max_model_len": model.session.limits.max_context, "tokens": ids}
    if not body.return_token_strs:
        return reply
    return {**reply, "token_strs": [model.tokenizer.id_to_piece(i) or "" for i in ids]}


async def detokenize(call: Call, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids."""
    model = await call.model(body.model)

    def text() -> str:
        check_token_ids(body.tokens, model.session.info.vocab_size, param="tokens")
        return model.tokenizer.decode(body.tokens, skip_special_tokens=False)

    return {"prompt": await call.in_worker(text)}


async def tokenizer_info(call: Call) -> dict[str, Any]:
    """Special tokens and chat template of the first model, as in tokenizer_config.json."""
    model = await call.model(None)
    tokenizer = model.tokenizer
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.named_tokens}
    if tokenizer.template is not None:
        info["chat_template"] = tokenizer.template.source_for(None)
    return {**info, "model_max_length": model.session.limits.max_context}
