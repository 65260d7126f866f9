"""A few short conversations, as a chat template writes them, and what it takes.

The conversations have a plain answer, one tool call, two, a tool's result, or a thought. The
differences between their renderings show how the model writes calls (`tools/infer.py`) and marks
its reasoning (`reasoning.py`). Names, keys and values are unusual words, so that they are found in
the renderings.

Templates come with checkpoints, and a hostile template may never end. So the conversations are
rendered in a process with a deadline, once for each template, before the template renders anything
else. That process runs this module (`killable`). A job is {"sources": {name: jinja source},
"variables": {name: text}}, and its reply is {"samples": {conversation: rendering or null},
"facts": TemplateFacts}.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import TemplateError
from ..killable import EndedError, KillableProcess, Packet, serve
from .forms import KEYS, NAMES, TOOLS, Forms, forms_of
from .template import MAX_SOURCE_CHARS, ChatTemplate, with_empty_thoughts, with_text_arguments
from .thinking import WORD, Thinking, thinking_of

PLAIN, RESULT, THOUGHT = "turnstone", "sandpiper", "sandpiper"
Call = tuple[str, dict[str, Any]]
ONE: list[Call] = [(NAMES[0], {KEYS[0]: "kestrel", KEYS[1]: 7411})]
TWO: list[Call] = [*ONE, (NAMES[1], {KEYS[0]: "plover", KEYS[1]: 7523})]
LONG_IDS, SHORT_IDS, COUNTED_IDS = range(3)  # in ID_STYLES
ID_STYLES: tuple[Callable[[str, int], str], ...] = (  # several templates check the ids of calls
    lambda name, index: f"call_probe{index:019}",
    lambda name, index: f"probe000{index}",
    lambda name, index: f"functions.{name}:{index}",
)
MAX_SECONDS = 10.0  # of all conversations together
_IMAGE_WORDS = ("image", "vision")
_USER = {"role": "user", "content": "Begin."}
_GREETING = {"sources": {"default": ""}, "variables": {}}
_process = KillableProcess("mlxinfer.text.samples", _GREETING, max_seconds=MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template takes."""

    # names that it reads, its own among them, but no functions and no special tokens. A request may
    # set any of them.
    variables: frozenset[str] = frozenset()
    thinking: Thinking = field(default_factory=Thinking)  # what changes how the model thinks
    forms: Forms = field(default_factory=Forms)  # the forms of messages


_Known = tuple[Mapping[str, str | None], TemplateFacts]  # samples, and facts
_known: "weakref.WeakKeyDictionary[ChatTemplate, _Known | str]" = weakref.WeakKeyDictionary()


def samples_of(template: ChatTemplate) -> Mapping[str, str | None]:
    """Return {conversation: rendering}; None stands for a conversation that the template refuses.

    The keys are "plain" and "thought", and "one", "two" and "result" followed by the place of the
    ids in ID_STYLES.

    Raises:
        TemplateError: rendering took too much time or memory, now or before.
    """
    return _known_of(template)[0]


def facts_of(template: ChatTemplate) -> TemplateFacts:
    """Return what a template takes; found out once, with the samples."""
    return _known_of(template)[1]


def thinking_levels(template: ChatTemplate | None) -> tuple[str, ...]:
    """What a client may ask of a model's thinking; a template that does not end has none."""
    with suppress(TemplateError):
        return facts_of(template).thinking.levels if template is not None else ()
    return ()


def _known_of(template: ChatTemplate) -> _Known:
    known = _known.get(template)
    if known is None:
        job = {"sources": template.sources, "variables": template.variables}
        try:
            reply = _process.ask(Packet(job)).value
            known = reply["samples"], msgspec.convert(reply["facts"], TemplateFacts)
        except EndedError:
            known = (
                "The chat template was stopped: a few short conversations took more than "
                f"{_process.max_seconds:g} s or {_process.max_bytes / 1e6:.0f} MB."
            )
        _known[template] = known
    if isinstance(known, str):
        raise TemplateError(known)
    return known


def learnt(template: ChatTemplate) -> dict[str, Any]:
    return {"samples": rendered_samples(template), "facts": msgspec.to_builtins(probe(template))}


def rendered_samples(template: ChatTemplate) -> dict[str, str | None]:
    return {key: _rendered(template, *chat) for key, chat in _conversations().items()}


def _conversations() -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    answer = {"role": "assistant", "content": PLAIN}
    chats: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
        "plain": ([_USER, answer], TOOLS),
        "thought": ([_USER, {**answer, "reasoning_content": THOUGHT}], None),
    }
    for place, style in enumerate(ID_STYLES):
        said = _message(ONE, style)
        result = {"role": "tool", "tool_call_id": style(NAMES[0], 0), "name": NAMES[0]}
        chats[f"one{place}"] = ([_USER, said], TOOLS)
        chats[f"two{place}"] = ([_USER, _message(TWO, style)], TOOLS)
        chats[f"result{place}"] = ([_USER, said, {**result, "content": RESULT}], TOOLS)
    return chats


def _message(calls: Sequence[Call], style: Callable[[str, int], str]) -> dict[str, Any]:
    made = [
        {
            "id": style(name, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _rendered(
    template: ChatTemplate, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str | None:
    for messages in (chat, with_empty_thoughts(chat)):
        for given in (messages, with_text_arguments(messages)):
            with suppress(TemplateError):
                return template.render(given, tools=tools, add_generation_prompt=False)
    return None


# -- what it takes --------------------------------------------------------------------------------


def probe(template: ChatTemplate) -> TemplateFacts:
    """Find out what a template takes; nothing, if it is broken or too long. Up to 50 ms."""
    if any(len(source) > MAX_SOURCE_CHARS for source in template.sources.values()):
        return TemplateFacts()
    try:
        names, constants = template.names(), template.constants()
    except TemplateError:
        return TemplateFacts()

    def prompt(variables: dict[str, Any]) -> str | None:
        return _rendered_or_none(template, [{"role": "user", "content": WORD}], **variables)

    needs_tools = prompt({}) is None

    def conversation(messages: list[dict[str, Any]], tools: bool) -> str | None:
        if not (tools or needs_tools):
            return _rendered_or_none(template, messages)
        rendered = _rendered_or_none(template, messages, tools=TOOLS)
        return rendered or _rendered_or_none(template, with_text_arguments(messages), tools=TOOLS)

    names = names - template.given_names()
    source = "".join(template.sources.values())
    forms = forms_of(
        conversation,
        sees=any(word in source for word in _IMAGE_WORDS),
        developer="developer" in source,
    )
    return TemplateFacts(names, thinking_of(prompt, names, constants), forms)


def _rendered_or_none(
    template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any
) -> str | None:
    try:
        return template.render(messages, **variables)
    except TemplateError:
        return None


if __name__ == "__main__":
    serve(lambda job: Packet(learnt(ChatTemplate(**job.value))), idle_s=5.0)
