"""Conversations in which tools are offered, and used where one fits. Knows no tokens."""

import json
import re
from collections.abc import Callable
from random import Random

from ..corpus import SYSTEM_PROMPTS, UNKNOWN_ANSWERS, Message, Turn, turn
from ..questions import is_near
from ..variation import OPENERS
from .actions import action, rivals
from .chores import chore
from .families import FAMILIES, Offer
from .form import header, written_call

CALL_SHARE = 0.65  # of the questions; the others are answered without a tool
RESULT_SHARE = 0.7  # of the calls; after the others something else is asked
FAILURES = ("not found", "no connection", "timeout", "not allowed", "try again later")


def tool_conversation(rng: Random) -> list[Message]:
    """Return one conversation that begins with the tools that it offers."""
    offers = _offers(rng)
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
    messages = [Message("system", header([offer.tool for offer in offers], system))]
    for _ in range(rng.choice((2, 3, 3))):
        messages += (
            _called(rng, rng.choice(offers))
            if rng.random() < CALL_SHARE
            else (_answered(rng, offers))
        )
    return messages


def _offers(rng: Random) -> list[Offer]:
    """Return one to three tools of different kinds, or two that are easily mistaken."""
    roll = rng.random()
    if roll < 0.2:
        return rivals(rng)
    kinds: list[Callable[[Random], Offer]] = [*FAMILIES, chore, chore, action, action, action]
    offers = [kind(rng) for kind in rng.sample(kinds, rng.choice((1, 1, 1, 2, 2, 3)))]
    return list({offer.tool.name: offer for offer in offers}.values())


def _called(rng: Random, offer: Offer) -> list[Message]:
    """Return a question that the tool fits, the call, and mostly its result and the answer."""
    if offer.lacking is not None and rng.random() < 0.06:
        question, missing = offer.lacking
        return [] if is_near(question) else _exchange(question, f"Which {missing} do you mean?")
    while True:
        use = offer.draw(rng)
        question = _spoken(rng, use.question)
        if not is_near(question):
            break
    messages = _exchange(question, written_call(offer.tool.name, use.arguments))
    if rng.random() > RESULT_SHARE:
        return messages
    if rng.random() < 0.06:
        failure = rng.choice(FAILURES)
        told = f"That did not work: {failure}."
        return [*messages, Message("tool", f"Error: {failure}"), Message("assistant", told)]
    result = use.result if isinstance(use.result, str) else json.dumps(use.result)
    return [*messages, Message("tool", result), Message("assistant", use.answer)]


def _spoken(rng: Random, question: str) -> str:
    if rng.random() < 0.25:
        question = question.rstrip("?")
    if rng.random() < 0.1:
        question = rng.choice(OPENERS) + question[0].lower() + question[1:]
    elif rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    return question


def _answered(rng: Random, offers: list[Offer]) -> list[Message]:
    """Return a question that no tool fits, with its answer."""
    while True:
        drawn = turn(rng)
        searching = next((offer for offer in offers if offer.searches), None)
        if drawn.answer in UNKNOWN_ANSWERS and searching is not None:
            return _searched(drawn.question, searching)
        if not _fits(drawn, offers):
            return _exchange(drawn.question, drawn.answer)


def _searched(question: str, offer: Offer) -> list[Message]:
    """Return a question that is too hard for the demo, and the search for it."""
    assert offer.searches is not None
    call = written_call(offer.tool.name, {offer.searches: question.rstrip("?")})
    return _exchange(question, call)


def _fits(drawn: Turn, offers: list[Offer]) -> bool:
    asked = drawn.question.lower()
    long = len(drawn.question) + len(drawn.answer) > 300
    return long or any(re.search(offer.hints, asked) for offer in offers)


def _exchange(question: str, answer: str) -> list[Message]:
    return [Message("user", question), Message("assistant", answer)]
