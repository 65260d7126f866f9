"""What a chat template takes, learnt by running it once: plain data for everything that asks.

`probe` runs in the process of `samples.py`, since a template may be hostile. Callers use `facts_of`
there.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import TemplateError
from .forms import TOOLS, Forms, forms_of
from .template import MAX_SOURCE_CHARS, ChatTemplate, with_text_arguments
from .thinking import WORD, Thinking, thinking_of

_IMAGE_WORDS = ("image", "vision")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template takes."""

    # names that it reads, its own among them, but no functions and no special tokens. A request may
    # set any of them.
    variables: frozenset[str] = frozenset()
    thinking: Thinking = field(default_factory=Thinking)  # what changes how the model thinks
    forms: Forms = field(default_factory=Forms)  # the forms of messages

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "variables": sorted(self.variables)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "TemplateFacts":
        thinking: dict[str, Any]
        forms: dict[str, Any]
        thinking, forms = (
            {key: tuple(value) if isinstance(value, list) else value for key, value in part.items()}
            for part in (given["thinking"], given["forms"])
        )
        return cls(frozenset(given["variables"]), Thinking(**thinking), Forms(**forms))


def probe(template: ChatTemplate) -> TemplateFacts:
    """Find out what a template takes; of one that is broken, or too long to be rendered, nothing.

    Takes up to 50 ms.
    """
    if any(len(source) > MAX_SOURCE_CHARS for source in template.sources.values()):
        return TemplateFacts()
    try:
        names, constants = template.names(), template.constants()
    except TemplateError:
        return TemplateFacts()

    def prompt(variables: dict[str, Any]) -> str | None:
        return _rendered(template, [{"role": "user", "content": WORD}], **variables)

    needs_tools = prompt({}) is None

    def conversation(messages: list[dict[str, Any]], tools: bool) -> str | None:
        if not (tools or needs_tools):
            return _rendered(template, messages)
        rendered = _rendered(template, messages, tools=TOOLS)
        return rendered or _rendered(template, with_text_arguments(messages), tools=TOOLS)

    names = names - template.given_names()
    source = "".join(template.sources.values())
    forms = forms_of(
        conversation,
        sees=any(word in source for word in _IMAGE_WORDS),
        developer="developer" in source,
    )
    return TemplateFacts(names, thinking_of(prompt, names, constants), forms)


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], **variables: Any
) -> str | None:
    try:
        return template.render(messages, **variables)
    except TemplateError:
        return None
