"""Which messages a chat template takes, found out by probes, and messages in a form that it takes.

A template may refuse a message, or leave its text out in silence: a second system message, a system
message at all, text where it reads a list of parts, two messages of the user in a row, text beside
calls, the calls themselves. `forms_of` renders short conversations in which each text is a word of
its own, and looks for the words. `Forms.apply` changes a conversation so that nothing is lost.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .template import around, joined, with_empty_thoughts

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
# None: the template refuses; the second argument says whether tools are declared
Render = Callable[[list[Message], bool], str | None]
Change = dict[str, Any]  # fields of Forms
WriteCalls = Callable[[list[Message]], str]
ROLES = ("system", "user", "assistant")
WORDS = ("turnstone", "sandpiper", "oystercatcher", "lapwing", "curlew")
_SYSTEMS = ("system", "developer")
NAMES = ("probe_alpha", "probe_beta")  # of functions
KEYS = ("akey", "bkey")  # in the order of the alphabet: some templates sort them
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": "A value."}
                    for key, kind in zip(KEYS, ("string", "integer"), strict=True)
                },
                "required": [],
            },
        },
    }
    for name in NAMES
]
VALUES, RESULTS, BESIDE = ("kestrel", "plover"), ("dunlin", "godwit"), "whimbrel"
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # of Mistral's templates
_COUNTED_ID = re.compile(r"functions\.[^:]+:[0-9]+")  # of Kimi K2's


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of messages that a template takes. Plain data; the defaults change nothing."""

    parts: tuple[str, ...] = ()  # roles whose content must be a list of parts
    # roles of which only the first text is written, so texts are joined in front
    first_part: tuple[str, ...] = ()
    # the first system message is written; otherwise its text goes to the user's message
    system: bool = True
    # further system messages are written where they stand; otherwise in front
    later_system: bool = True
    developer: bool = True  # the role developer is written; otherwise it becomes system
    repeats: bool = True  # messages of the user may follow each other; otherwise they become one
    calls: bool = True  # calls of earlier turns are written
    # how a text beside calls is kept: "as it is", "apart" (as a message before the calls), or
    # "written" (the calls become text, too)
    beside_calls: str = "as it is"
    results: bool = True  # messages of the role tool are written
    several_calls: bool = True  # a message may have several calls
    # how ids of calls look: "any", "short" (nine letters and digits) or "counted" (the name of the
    # function and the number of the call)
    ids: str = "any"
    empty_thoughts: bool = False  # an answer without a thought has an empty one

    def apply(self, messages: Messages, write_calls: WriteCalls) -> list[Message]:
        """Return a conversation in a form that the template takes."""
        chat = [dict(message) for message in messages]
        if not self.developer:
            chat = [{**m, "role": "system"} if m["role"] == "developer" else m for m in chat]
        if not (self.system and self.later_system):
            chat = self._with_system_in_front(chat)
        if not (self.calls and self.results) or self.beside_calls == "written":
            chat = self._as_text(chat, write_calls)
        if not self.several_calls or self.beside_calls == "apart":
            chat = self._with_single_calls(chat)
        if not self.repeats:
            chat = _with_joined_users(chat)
        if self.ids != "any":
            chat = _with_ids(chat, self.ids)
        if self.empty_thoughts:
            chat = with_empty_thoughts(chat)
        return [self._in_parts(message) for message in chat]

    def _with_system_in_front(self, chat: list[Message]) -> list[Message]:
        """Return messages with all system texts in the first message, or in the user's first."""
        if self.system and not any(m["role"] in _SYSTEMS for m in chat[1:]):
            return chat
        systems = [message for message in chat if message["role"] in _SYSTEMS]
        rest = [message for message in chat if message["role"] not in _SYSTEMS]
        if not systems:
            return chat
        content = systems[0].get("content")
        for message in systems[1:]:
            content = joined(content or "", message.get("content") or "", "\n\n")
        if self.system:
            return [{**systems[0], "content": content}, *rest]
        place = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
        if place is None:
            return [{"role": "user", "content": content}, *rest]
        whole = joined(content or "", rest[place].get("content") or "", "\n\n")
        return [*rest[:place], {**rest[place], "content": whole}, *rest[place + 1 :]]

    def _as_text(self, chat: list[Message], write_calls: WriteCalls) -> list[Message]:
        changed: list[Message] = []
        results = self.results  # of the last calls are messages of the role tool
        for message in chat:
            calls, content = calls_of(message), message.get("content")
            if message["role"] == "tool" and not results:
                content = around(content, "<tool_response>\n", "\n</tool_response>")
                message = {"role": "user", "content": content}
            elif calls:
                beside = bool(content) and self.beside_calls == "written"
                results = self.results and not beside
                if beside or not self.calls:
                    text = write_calls(calls)
                    whole = joined(content, text) if content else text
                    message = {**_without_calls(message), "content": whole}
            changed.append(message)
        return changed

    def _with_single_calls(self, chat: list[Message]) -> list[Message]:
        """Return messages in which text and calls, or single calls, are messages of their own.

        The result of a call follows its message.
        """
        changed: list[Message] = []
        moved: set[int] = set()  # places of results that follow their calls already
        for place, message in enumerate(chat):
            if place in moved:
                continue
            calls = calls_of(message)
            if calls and message.get("content") and self.beside_calls == "apart":
                changed.append(_without_calls(message))
                message = {"role": "assistant", "content": "", "tool_calls": calls}
            if len(calls) < 2 or self.several_calls:
                changed.append(message)
                continue
            results = _results_after(chat, place)
            for number, call in enumerate(calls):
                head = message if number == 0 else {"role": "assistant", "content": ""}
                changed.append({**head, "tool_calls": [call]})
                for i, result in results.items():
                    if result.get("tool_call_id") == call.get("id") and i not in moved:
                        changed.append(result)
                        moved.add(i)
        return changed

    def _in_parts(self, message: Message) -> Message:
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and role in self.first_part:
            text = "\n".join(part["text"] for part in content if part.get("type") == "text")
            media = [part for part in content if part.get("type") != "text"]
            return {**message, "content": [{"type": "text", "text": text}, *media]}
        if role not in self.parts or not isinstance(content, str):
            return message
        return {**message, "content": [{"type": "text", "text": content}]}


def calls_of(message: Mapping[str, Any]) -> list[Message]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, (list, tuple)) else []


def _without_calls(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _results_after(chat: Sequence[Message], place: int) -> dict[int, Message]:
    results: dict[int, Message] = {}
    for i in range(place + 1, len(chat)):
        if chat[i]["role"] != "tool":
            break
        results[i] = chat[i]
    return results


def _with_joined_users(chat: list[Message]) -> list[Message]:
    changed: list[Message] = []
    for message in chat:
        if message["role"] == "user" and changed and changed[-1]["role"] == "user":
            content = joined(changed[-1].get("content") or "", message.get("content") or "")
            changed[-1] = {**changed[-1], "content": content}
        else:
            changed.append(message)
    return changed


def _with_ids(chat: list[Message], style: str) -> list[Message]:
    form = _SHORT_ID if style == "short" else _COUNTED_ID
    new: dict[Any, str] = {}
    changed = []
    for message in chat:
        calls = []
        for call in calls_of(message):
            identity = call.get("id")
            if not isinstance(identity, str) or not form.fullmatch(identity):
                name = call.get("function", call).get("name")
                short = hashlib.blake2b(str(identity).encode(), digest_size=8).hexdigest()[:9]
                new[identity] = short if style == "short" else f"functions.{name}:{len(new)}"
            calls.append({**call, "id": new.get(identity, identity)})
        other: Message = {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") in new:
            other["tool_call_id"] = new[message["tool_call_id"]]
        changed.append({**message, **other} if other else message)
    return changed


# -- probes ---------------------------------------------------------------------------------------


def forms_of(render: Render, *, sees: bool, developer: bool) -> Forms:
    """Find out which messages a template takes.

    Args:
        render: renders messages as they are; the second argument says whether tools are declared.
        developer: the template names the role developer. Others may write any role, and models
            know only those that they were trained with.
    """
    return _Probe(render, developer=developer).run(sees=sees)


@dataclass(frozen=True, slots=True)
class _Situation:
    """A conversation, the words that its prompt must have in their order, and others."""

    messages: list[Message]
    words: tuple[str, ...]
    anywhere: tuple[str, ...] = ()
    tools: bool = False


class _Probe:
    """Tries changes of `Forms` until every situation so far is written without a loss."""

    def __init__(self, render: Render, *, developer: bool) -> None:
        self._render = render
        self._solved: list[_Situation] = []
        self.forms = Forms(developer=developer)

    def run(self, *, sees: bool) -> Forms:
        no_system = {"system": False, "later_system": False}
        all_parts = {"parts": (*ROLES, "tool")}
        by_role = [{"parts": roles} for roles in (("user",), ("assistant",), ("user", "assistant"))]
        self._solve([_said("user")], all_parts, *by_role)
        if not self._solved:  # it needs more than messages
            return self.forms
        thoughts = {"empty_thoughts": True}
        self._solve([_said("user", "assistant", "user")], all_parts, *by_role, thoughts)
        self._solve([_said("user", "user")], {"repeats": False})
        parts = {"parts": tuple(dict.fromkeys((*self.forms.parts, "system")))}
        texts = {"parts": tuple(role for role in self.forms.parts if role != "system")}
        self._solve([_said("system", "user", "assistant", "user")], parts, texts, no_system)
        developer = {"developer": False}
        self._solve([_said("developer", "user")], developer)
        later = [_said("system", "system", "user"), _said(*_LATER)]
        self._solve(later, {"later_system": False}, no_system)
        mixed = tuple("developer" if role == "system" else role for role in _LATER)
        both = {**developer, "later_system": False}
        self._solve([_said(*mixed), _said("system", *mixed[1:])], developer, both)
        if sees:
            self._solve([_seen()], {"first_part": ("user",)}, all_parts)
        self._solve_calls()
        return self.forms

    def _solve_calls(self) -> None:
        parts = {"parts": tuple(dict.fromkeys((*self.forms.parts, "tool")))}
        no_parts = {"parts": tuple(role for role in self.forms.parts if role != "tool")}
        as_text = {"calls": False}
        no_results = {"results": False, "repeats": False}
        styles: list[Change] = [{"ids": style} for style in ("short", "counted")]
        for names in (NAMES[:1], NAMES):
            single: Change = {"several_calls": False}
            options: list[Change] = [
                parts,
                no_parts,
                single,
                *styles,
                *({**fields, **single} for fields in styles),
            ]
            options += [as_text, {**as_text, **parts}, no_results, {**as_text, **no_results}]
            self._solve([_called("", *names)], *options)
        apart, written = {"beside_calls": "apart"}, {"beside_calls": "written"}
        beside: list[Change] = [apart, {**apart, "several_calls": False}, written]
        self._solve([_called(BESIDE), _called(BESIDE, *NAMES)], *beside)

    def _solve(self, situations: Sequence[_Situation], *changes: Change) -> None:
        """Take the first change with which these situations, and those before, lose nothing.

        Where none helps, the forms stay as they are.
        """
        for change in ({}, *changes):
            forms = replace(self.forms, **change)
            before = self._solved if change else ()
            if all(self._is_written(forms, situation) for situation in (*situations, *before)):
                self.forms = forms
                self._solved += situations
                return

    def _is_written(self, forms: Forms, situation: _Situation) -> bool:
        text = self._render(forms.apply(situation.messages, str), situation.tools)
        if text is None or any(word not in text for word in situation.anywhere):
            return False
        place = 0
        for word in situation.words:
            place = text.find(word, place)
            if place < 0:
                return False
            place += len(word)
        return True


_LATER = ("system", "user", "assistant", "system", "user")


def _said(*roles: str) -> _Situation:
    """Return a conversation of these roles; a template may write system texts elsewhere."""
    messages = [{"role": role, "content": word} for role, word in zip(roles, WORDS, strict=False)]
    words = tuple(m["content"] for m in messages if m["role"] not in _SYSTEMS)
    return _Situation(messages, words, tuple(m["content"] for m in messages))


def _seen() -> _Situation:
    before, after, answer, question = WORDS[:4]
    parts = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    messages: list[Message] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    ]
    return _Situation(messages, (before, after, answer, question))


def _called(text: str, *names: str) -> _Situation:
    """Return a conversation with calls beside a text, their results, and a further question."""
    names = names or NAMES[:1]
    question, answer, last = WORDS[:3]
    calls = [
        {
            "id": f"call_probe{number:019}",
            "type": "function",
            "function": {"name": name, "arguments": {KEYS[0]: value}},
        }
        for number, (name, value) in enumerate(zip(names, VALUES, strict=False))
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}
        for call, name, result in zip(calls, names, RESULTS, strict=False)
    ]
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": last},
    ]
    rest = [*([text] if text else []), *names, *VALUES[: len(names)], *RESULTS[: len(names)]]
    return _Situation(messages, (question, answer, last), tuple(rest), tools=True)
