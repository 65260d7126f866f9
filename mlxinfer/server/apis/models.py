"""GET /v1/models and /v1/models/{id}, in OpenAI's form, and in Anthropic's for its clients."""

from datetime import UTC, datetime
from urllib.parse import parse_qsl

from ...core import SamplingParams
from ..call import Call
from ..http import Plain, page_of
from ..slots import ModelSlot

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip

ANTHROPIC_VERSION = b"anthropic-version"  # a header that every client of Anthropic's API sends
MAX_PAGE = 1000  # models


async def list_models(call: Call) -> Plain:
    """All models and their adapters, loaded or not; a page of models for Anthropic's clients."""
    slots = call.service.models.slots()
    if call.header(ANTHROPIC_VERSION) is not None:
        query = call.scope["query_string"].decode("ascii", "replace")
        stages = [v for k, v in parse_qsl(query) if k in ("lifecycle", "lifecycle[]")]
        shown = slots if not stages or "active" in stages else []
        cards = [_anthropic_card(slot) for slot in shown]
        return page_of(cards, call.query, MAX_PAGE, after="after_id", before="before_id")
    cards = []
    for slot in slots:
        cards += [_card(slot), *(_adapter_card(slot, adapter) for adapter in slot.adapters)]
    return {"object": "list", "data": cards}


async def show_model(call: Call) -> Plain:
    """One model, by name or alias."""
    slot, adapter = call.service.models.resolve(call.path_params["name"])
    if call.header(ANTHROPIC_VERSION) is not None:
        return _anthropic_card(slot)
    return _card(slot) if adapter is None else _adapter_card(slot, adapter)


def _adapter_card(slot: ModelSlot, adapter: str) -> Plain:
    card = _card(slot)
    card |= {"id": f"{card['id']}:{adapter}", "parent": card["id"], "aliases": [adapter]}
    return {**card, "state": "failed"} if adapter in slot.adapter_failures else card


def _card(slot: ModelSlot) -> Plain:
    """A model; what its files say is null before its first load.

    `sampling` holds for requests that leave a field out. `chat_sampling` are the values by which
    LLM.chat asks it: those of generation_config.json, or else greedy.
    """
    facts = slot.facts
    return {
        "id": slot.entry.name,
        "object": "model",
        "created": slot.entry.created_s,
        "owned_by": "mlxinfer",
        "max_model_len": slot.max_context,  # tokens of prompt and answer
        "context_length": slot.max_context,  # the same
        "capabilities": slot.capabilities,
        "sampling": _sampling(slot.defaults),
        "chat_sampling": None if facts is None else _sampling(facts.chat_params),
        "thinking": None if facts is None else list(facts.thinking),
        "vocab_size": None if facts is None else facts.vocab_size,
        "state": slot.state,
        "load_progress": slot.load_progress,  # null: it is not being loaded
        "aliases": list(slot.entry.aliases),  # other names that requests may use
        "root": slot.entry.root,
        "parent": None,  # of an adapter: the model that it changes
    }


def _sampling(params: SamplingParams | None) -> Plain | None:
    return None if params is None else {name: getattr(params, name) for name in SAMPLING}


def _anthropic_card(slot: ModelSlot) -> Plain:
    return {
        "id": slot.entry.name,
        "type": "model",
        "display_name": slot.entry.name,
        "created_at": datetime.fromtimestamp(slot.entry.created_s, UTC).isoformat()[:19] + "Z",
        "lifecycle": "active",
        "max_input_tokens": slot.max_context,  # of prompt and answer; null before its first load
        "max_tokens": slot.max_context,
    }
