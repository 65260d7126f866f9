"""How a chat template is told to think, or how much: found out by rendering a short conversation.

Clients send an effort, a switch or a number of tokens. Templates read variables with names and
values of their own, refuse other values, or ignore them. `thinking_of` renders one message with
each value that a variable may take, and keeps those that change the prompt. `Thinking.variables`
maps a client's wish to the nearest of them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core import EFFORTS

SWITCH_NAMES = frozenset(("enable_thinking", "thinking"))  # by which clients switch any model
CLIENT_NAMES = SWITCH_NAMES | {"reasoning_effort", "preserve_thinking", "thinking_budget"}
OFF, ON = "off", "on"
WORD = "turnstone"  # the message of the probe
_UNKNOWN = "sandpiper"  # no template knows this value
_SWITCH = re.compile(
    r"(enable_|use_|with_|is_|do_)?(think|thinking|reason|reasoning)(_enabled|_on)?"
)
_MODE = re.compile(r"(think|thinking|reason|reasoning)_(mode|option|type|style)")
_EFFORT = re.compile(r"((think|thinking|reason|reasoning)_)?(effort|strength|level|intensity)")
_FLAG = re.compile(rf"({'|'.join(EFFORTS[1:])})_effort")
_BUDGET = re.compile(r"(think|thinking|reason|reasoning)(_token)?_budget(_tokens)?")
_OFF_WORDS = (
    "none", "off", "disabled", "disable", "no_think", "no_thinking", "nothink", "non_thinking",
    "non-thinking", "no-think", "no", "never", "false", "chat", "instruct", "fast", "direct",
)  # fmt: skip
_ON_WORDS = (
    "enabled", "enable", "on", "think", "thinking", "yes", "always", "true", "reasoning", "deep",
    "adaptive", "auto",
)  # fmt: skip
_TAUGHT = ("low", "medium", "high")  # where a template writes any level: those of the first API
_TOKENS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 8192, "xhigh": 16384, "max": None}
# Where a template takes a number from 0, no thinking, to 1. Source: Inkling's documentation, which
# names the numbers that it was trained with.
_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99}
Variables = dict[str, Any]
Render = Callable[[Variables], str | None]  # None: the template refuses


@dataclass(frozen=True, slots=True)
class Thinking:
    """What changes how a model thinks. Plain data.

    Attributes:
        wishes: {wish: variables of the template}; a wish is OFF, ON or one of EFFORTS but "none". A
            wish that no variable can express is missing.
        efforts: the efforts that the template itself distinguishes, in rising order.
        budget: name of the variable that takes a number of tokens; "": there is none.
    """

    wishes: Mapping[str, Variables] = field(default_factory=dict)
    efforts: tuple[str, ...] = ()
    budget: str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        """What a client may ask for and get, from "off" on, in rising order."""
        switches = (OFF, ON) if OFF in self.wishes else ()
        return (*switches, *self.efforts)

    def variables(
        self, effort: str | bool | None, switch: bool | None = None, budget: int | None = None
    ) -> tuple[Variables, bool]:
        """Return the variables that tell the template a client's wish.

        Args:
            effort: one of EFFORTS, or True and False; None: not given.
            switch: think, or do not; None: not given.
            budget: the most tokens of thinking; None: not given.

        Returns:
            The variables, and whether the template can express effort and switch. Where it cannot
            stop the thinking, the variables ask for the least.
        """
        if isinstance(effort, bool):
            effort, switch = None, effort if switch is None else switch
        if switch is False or effort == "none":
            return (dict(self.wishes[OFF]), True) if OFF in self.wishes else (self._least(), False)
        wish = effort or (ON if switch else None)
        variables = dict(self.wishes.get(wish or "", {}))
        if self.budget and budget is not None:
            variables[self.budget] = budget
        return variables, wish is None or wish in self.wishes

    def _least(self) -> Variables:
        return dict(self.wishes[self.efforts[0]]) if self.efforts else {}


def thinking_of(render: Render, names: Iterable[str], constants: Iterable[str]) -> Thinking:
    """Find out how a template is told to think.

    Args:
        render: renders one message of the user, WORD, and the header of the answer, with variables.
    """
    return _Probe(render, sorted(names), constants).run()


class _Probe:
    """Renders values of variables; each once."""

    def __init__(self, render: Render, names: Sequence[str], constants: Iterable[str]) -> None:
        self._render, self._names = render, names
        self._words = [word for word in dict.fromkeys(constants) if 1 < len(word) <= 24]
        self._prompts: dict[str, str | None] = {}

    def run(self) -> Thinking:
        on, off = self._switch()
        rungs = self._rungs(on, off)
        budget = next(iter(self._matching(_BUDGET)), "")
        if budget and self._prompt({budget: 1000}) in (None, self._prompt({})):
            budget = ""
        if budget and not rungs:
            rungs = {
                EFFORTS.index(effort): {**(on or {}), **({budget: tokens} if tokens else {})}
                for effort, tokens in _TOKENS.items()
            }
        if budget and off is None and self._differs({budget: 0}, {}):
            off = {budget: 0}
        if off is None:
            off = self._off_effort(rungs)
        if off is not None:
            rungs = {
                place: variables
                for place, variables in rungs.items()
                if self._differs(variables, off)
            }
        if not rungs and off is None:
            return Thinking()
        on = self._on(on, off, rungs)
        wishes = {} if off is None else {OFF: off}
        wishes |= {ON: on, **{wish: self._nearest(rungs, wish, on) for wish in EFFORTS[1:]}}
        return Thinking(wishes, tuple(EFFORTS[place] for place in sorted(rungs)), budget)

    # -- off and on -----------------------------------------------------------------------------

    def _switch(self) -> tuple[Variables | None, Variables | None]:
        """Return the variables that switch thinking on, and off; None: there is no switch."""
        options: list[tuple[Variables, Variables]]
        options = [({name: True}, {name: False}) for name in self._matching(_SWITCH)]
        for name in self._matching(_MODE):
            off_words = [word for word in _OFF_WORDS if word in self._words]
            on_words = [word for word in _ON_WORDS if word in self._words]
            ons: list[Variables] = [*({name: word} for word in on_words[:3]), {}]
            options += [(on, {name: word}) for on in ons for word in off_words[:3]]
        for on, off in options:
            if self._differs(on, off):
                return on, off
        return None, None

    def _on(
        self, on: Variables | None, off: Variables | None, rungs: Mapping[int, Variables]
    ) -> Variables:
        if on is not None:
            return on
        if off is None or self._differs({}, off) or not rungs:
            return {}
        return rungs[max(rungs)]

    def _off_effort(self, rungs: Mapping[int, Variables]) -> Variables | None:
        """Return an effort that is none: by its name, or as its thought is closed at once."""
        if not rungs:
            return None
        top = self._prompt(rungs[max(rungs)]) or ""
        for name in self._matching(_EFFORT):
            if self._takes_numbers(name):
                return {name: 0.0}
            known = [word for word in _OFF_WORDS if word in self._words]
            for word in (*known, "none", *EFFORTS[1:3]):
                prompt = self._prompt({name: word})
                if prompt is None or prompt in (top, self._prompt({name: _UNKNOWN})):
                    continue
                begun, ended = (text.rpartition(WORD)[2] for text in (top, prompt))
                is_closed = begun != ended and ended.startswith(begun)
                if is_closed or (word in _OFF_WORDS and _UNKNOWN not in self._text(name)):
                    return {name: word}
        return None

    # -- efforts --------------------------------------------------------------------------------

    def _rungs(self, on: Variables | None, off: Variables | None) -> dict[int, Variables]:
        """Return {place in EFFORTS: variables} of the efforts that the template distinguishes."""
        base = on or {}
        for name in self._matching(_EFFORT):
            rungs = self._values(name, base) or self._shares(name, base)
            if rungs:
                return rungs
        flags = {
            EFFORTS.index(name.removesuffix("_effort")): {**base, name: True}
            for name in self._matching(_FLAG)
            if self._differs({**base, name: True}, base)
        }
        return {**flags, EFFORTS.index("high"): base} if flags else {}

    def _values(self, name: str, base: Variables) -> dict[int, Variables]:
        """Return the efforts that a variable takes, each with a prompt that depends on it."""
        options = {place: {**base, name: word} for place, word in enumerate(EFFORTS) if place}
        prompts = {place: self._prompt(variables) for place, variables in options.items()}
        other = self._prompt({**base, name: _UNKNOWN})
        if other is not None and _UNKNOWN in other:  # it writes any word
            taught = {*_TAUGHT, *(word for word in EFFORTS if word in self._words)}
            return {place: option for place, option in options.items() if EFFORTS[place] in taught}
        accepted = {
            place: option for place, option in options.items() if prompts[place] is not None
        }
        if other is None:
            return accepted if len(set(prompts.values()) - {None}) > 1 else {}
        special = {place for place in accepted if prompts[place] != other}
        if not special:
            return {}
        usual = EFFORTS.index("high")  # stands for the values that make no difference
        return {place: accepted[place] for place in sorted({*special, usual}) if place in accepted}

    def _shares(self, name: str, base: Variables) -> dict[int, Variables]:
        if not self._takes_numbers(name):
            return {}
        return {EFFORTS.index(word): {**base, name: share} for word, share in _SHARES.items()}

    def _takes_numbers(self, name: str) -> bool:
        """Whether a variable takes numbers from 0 to 1; one that writes any word does not."""
        return self._differs({name: 0.2}, {name: 0.7}) and _UNKNOWN not in self._text(name)

    @staticmethod
    def _nearest(rungs: Mapping[int, Variables], wish: str, on: Variables) -> Variables:
        """Return the variables of the effort that is nearest to a wish; of two the higher one."""
        if not rungs:
            return on
        place = EFFORTS.index(wish)
        return rungs[min(rungs, key=lambda rung: (abs(rung - place), -rung))]

    # -- rendering ------------------------------------------------------------------------------

    def _matching(self, form: re.Pattern[str]) -> list[str]:
        return [name for name in self._names if form.fullmatch(name)]

    def _text(self, name: str) -> str:
        return self._prompt({name: _UNKNOWN}) or ""

    def _differs(self, one: Variables, two: Variables) -> bool:
        first, second = self._prompt(one), self._prompt(two)
        return None not in (first, second) and first != second

    def _prompt(self, variables: Variables) -> str | None:
        key = repr(sorted(variables.items()))
        if key not in self._prompts:
            self._prompts[key] = self._render(variables)
        return self._prompts[key]
