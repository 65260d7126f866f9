"""Programs over a model: Python code that writes a prompt, lets the model go on, and branches.

A program is what stands in it: messages, or plain text before there is a message. The model's next
part is the answer to an ordinary request whose prompt is exactly that. So programs share prefixes,
and take grammars, adapters, speculation and remote models, as all requests do.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, Unpack

from .core import LEAST_SEED, MOST_SEED, NO_SEED, FinishReason, SamplingParams, later_seed
from .errors import InvalidRequestError, PartNotFoundError, check_int, shown, wrong_value
from .files import open_lines
from .outputs import Delta, Result, Results, ToolCall
from .progress import Watch
from .session.arguments import TextArguments, with_images
from .session.base import ModelSession, adeltas, deltas, last
from .session.inputs import Input, Message, TextInput

T = TypeVar("T")
Item = TypeVar("Item")
Key = str | int
MakeInput = Callable[[str, Sequence[Message], Mapping[str, Any]], Input]  # text, messages, options

SCORED = SamplingParams(max_tokens=None, temperature=0.0, logprobs=0)  # of a choice


class PartArguments(TextArguments, total=False):
    """Keyword arguments of `gen`, as those of LLM.chat."""

    chat_template_kwargs: Mapping[str, Any] | None
    schema: Mapping[str, Any]
    tools: Sequence[Message | Callable[..., Any]] | None
    tool_choice: str | Message
    parallel_tool_calls: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice that `select` took.

    Attributes:
        text: the choice.
        scores: of every choice: the mean of its tokens' log-probabilities, or their sum.
    """

    text: str
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """The contents of a program at one moment. Nothing in it changes.

    Attributes:
        text: plain text, where there are no messages.
        messages: of a conversation.
        inherited: values of named parts from before the fork.
        named: values of parts that were named since.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    inherited: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's, which the next part continues."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def plus(self, text: str, reasoning: str | None = None) -> "Mark":
        """The same with text behind it: the assistant's, or plain text before any message."""
        if not self.messages:
            return replace(self, text=self.text + text)
        if not text and reasoning is None:
            return self
        if not self.continues:
            empty = {"role": "assistant", "content": ""}
            return replace(self, messages=(*self.messages, empty)).plus(text, reasoning)
        *before, said = self.messages
        message = {**said, "content": said["content"] + text}
        if reasoning is not None:
            message["reasoning_content"] = said.get("reasoning_content", "") + reasoning
        return replace(self, messages=(*before, message))

    def calling(self, calls: Sequence[ToolCall]) -> "Mark":
        """The same, and the assistant's message makes these calls."""
        if not calls:
            return self
        if not self.continues:
            empty = {"role": "assistant", "content": ""}
            return replace(self, messages=(*self.messages, empty)).calling(calls)
        *before, said = self.messages
        made = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
            if call.complete
        ]
        return replace(self, messages=(*before, {**said, "tool_calls": made}))

    def naming(self, name: str, value: object) -> "Mark":
        """The same with a named value."""
        return replace(self, named={**self.named, name: value})


class Program:
    """A conversation or a text that grows by what Python adds and by what the model writes.

    `LLM.program` makes it. One thread or task uses it at a time; branches run side by side.

    Args:
        session: runs the requests.
        make: makes the input of what stands here.
        options: of every part.
        number: of the branch, counted through branches of branches; it is added to seeds.
    """

    def __init__(
        self, session: ModelSession, make: MakeInput, options: PartArguments, number: int = 0
    ) -> None:
        self.session, self._make, self._options, self.number = session, make, options, number
        self._now = Mark()
        self._forks: list[Branches] = []
        self._ended = False

    # -- what stands there ----------------------------------------------------------------------

    def system(self, text: str) -> None:
        """Add a message of the system."""
        self._say("system", text)

    def user(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> None:
        """Add a message of the user; pictures and videos stand before its text, as in LLM.chat."""
        self._say("user", text, images, videos)

    def tool(self, call: ToolCall, content: str) -> None:
        """Add the result of a call that the model made in the part before.

        Raises:
            InvalidRequestError: the model made no such call there.
        """
        *_, last = [m for m in self._now.messages if m["role"] == "assistant"] or [{}]
        if call.id not in [made["id"] for made in last.get("tool_calls", ())]:
            raise InvalidRequestError(f"The last part has no call {shown(call.id)}.", param="call")
        result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
        self._set(replace(self._now, messages=(*self._now.messages, result)))

    def _say(
        self, role: str, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()
    ) -> None:
        if self._now.text:
            raise InvalidRequestError(
                "This program began with plain text; messages go into one of their own."
            )
        said = with_images([{"role": role, "content": text}], images, videos)
        self._set(replace(self._now, messages=(*self._now.messages, *said)))

    def __iadd__(self, text: str) -> Self:
        """Add text of the assistant, or plain text where there is no message yet."""
        self._set(self._now.plus(text))
        return self

    @property
    def text(self) -> str:
        """The plain text, or what the assistant's last message says so far."""
        now = self._now
        return str(now.messages[-1]["content"]) if now.continues else now.text

    @property
    def messages(self) -> list[Message]:
        """The messages so far."""
        return list(self._now.messages)

    def __getitem__(self, name: str) -> Any:
        """The text of a named part; after `join` the list of the branches' texts."""
        values = {**self._now.inherited, **self._now.named}
        if name not in list(values):  # also what has no hash
            known = ", ".join(values) or "nothing"
            raise PartNotFoundError(f"No part is named {shown(name)}; there is {known}.")
        return values[name]

    def __contains__(self, name: object) -> bool:
        return name in [*self._now.inherited, *self._now.named]

    __iter__ = None  # not by numbers, which are no names

    def mark(self) -> Mark:
        """The contents now, for `rollback`."""
        return self._now

    def rollback(self, mark: Mark) -> None:
        """Return to a mark: text, messages and named parts."""
        self._set(mark)
        self._forks = []

    # -- what the model writes ------------------------------------------------------------------

    def gen(self, name: str, **options: Unpack[PartArguments]) -> Result:
        """Let the model go on, and name what it writes.

        Args:
            name: of the part: `program[name]` is its text.
            options: `schema`, a JSON schema that the part must fit, and those of LLM.chat, such as
                max_tokens, stop, seed, response_format, adapter and tools. They replace the
                program's.

        Raises:
            As LLM.chat and LLM.generate.
        """
        return Branches((self,)).gen(name, **options)[0]

    async def agen(self, name: str, **options: Unpack[PartArguments]) -> Result:
        """`gen` for asyncio; cancelling the task ends the request."""
        return (await Branches((self,)).agen(name, **options))[0]

    def stream(self, name: str, **options: Unpack[PartArguments]) -> Iterator[Delta]:
        """`gen` that yields what each step adds.

        Leaving the loop ends the request and adds nothing to the program.
        """
        given = self._input(name, options)
        return self._taken(name, self._now, deltas(self.session.start(given)))

    def _taken(self, name: str, sent: Mark, running: Iterator[Delta]) -> Iterator[Delta]:
        for delta in running:
            if delta.result is not None:
                self._take(name, sent, delta.result)
            yield delta

    async def astream(self, name: str, **options: Unpack[PartArguments]) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        given, sent = self._input(name, options), self._now
        async for delta in adeltas(self.session.start, given):
            if delta.result is not None:
                self._take(name, sent, delta.result)
            yield delta

    def select(self, name: str, choices: Iterable[str], *, per_token: bool = True) -> Selection:
        """Add the most probable of the choices, and name it.

        Each choice is scored whole, as the text that comes next. A model that reasons does not
        reason before it. The scores are those of the model itself: no temperature, no penalties.

        Args:
            name: of the part.
            choices: different texts; any iterable of them.
            per_token: compare the mean log-probability of a choice's tokens; False: their sum,
                which prefers short choices.

        Raises:
            InvalidRequestError: a choice is wrong, or the model is a server's.
        """
        return Branches((self,)).select(name, choices, per_token=per_token)[0]

    async def aselect(
        self, name: str, choices: Iterable[str], *, per_token: bool = True
    ) -> Selection:
        """`select` for asyncio."""
        return (await Branches((self,)).aselect(name, choices, per_token=per_token))[0]

    # -- branches -------------------------------------------------------------------------------

    def fork(self, count: int) -> "Branches":
        """Branches that begin with all that stands here.

        Branch number i adds i to the seeds of its parts.
        """
        if type(count) is not int or count < 1:
            raise InvalidRequestError(f"fork({shown(count)}): expected 1 or more.", param="count")
        inherited = {**self._now.inherited, **self._now.named}
        numbers = range(self.number * count, (self.number + 1) * count)
        new = [Program(self.session, self._make, self._options, number) for number in numbers]
        branches = Branches(new)
        for branch in branches:
            branch._now = replace(self._now, inherited=inherited, named={})
        self._forks.append(branches)
        return branches

    def join(self) -> None:
        """End the forks. A part that their branches named becomes the list of their values here.

        A branch without the part has None in the list. Forks of branches are joined first. The text
        of this program stays: text that the branches wrote is not added to it.
        """
        joined = self._now
        for branches in self._forks:
            for branch in branches:
                branch.join()
            values = [branch._now.named for branch in branches]
            for name in dict.fromkeys(name for named in values for name in named):
                joined = joined.naming(name, [named.get(name) for named in values])
        self._set(joined)
        self._forks = []

    # -- within ---------------------------------------------------------------------------------

    def _set(self, now: Mark, sent: Mark | None = None) -> None:
        """Replace the state of the program. `sent`: its state when the model was asked."""
        if self._ended:
            raise InvalidRequestError("This program has ended: its `with` block was left.")
        if sent is not None and sent is not self._now:
            raise InvalidRequestError(
                "The program changed while the model wrote a part of it; fork() gives branches "
                "that run side by side."
            )
        self._now = now

    def _input(self, name: str, options: Mapping[str, Any]) -> Input:
        now = self._now
        given = {**self._options, **_form(name, self._options), **options, **_form(name, options)}
        given.pop("schema", None)
        check_int("seed", given.get("seed"), low=LEAST_SEED, high=MOST_SEED, optional=True)
        if given.get("seed") not in (None, NO_SEED):
            given["seed"] = later_seed(given["seed"], self.number)
        if now.continues:
            variables = given.get("chat_template_kwargs") or {}
            given["chat_template_kwargs"] = {**variables, "continue_final_message": True}
        return self._make(now.text, now.messages, given)

    def _take(self, name: str, sent: Mark, result: Result) -> None:
        said = sent.plus(result.text, result.reasoning).calling(result.tool_calls)
        self._set(said.naming(name, result.text), sent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True


def _form(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The response_format of options with a schema; {}: they have none."""
    schema = options.get("schema")
    if schema is None:
        return {}
    if options.get("response_format") is not None:
        raise InvalidRequestError.of(
            "schema", "and response_format are both given; a part has one form: leave one out."
        )
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    }


class Branches(tuple[Program, ...]):
    """Programs that go on side by side: their requests are submitted together, as one batch."""

    __slots__ = ()

    def user(self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> None:
        """Add the same message of the user to each."""
        for branch in self:
            branch.user(text, images, videos)

    def gen(self, name: str, **options: Unpack[PartArguments]) -> Results:
        """`Program.gen` of all, in one batch."""
        sent, inputs = self._sent, [branch._input(name, options) for branch in self]
        return self._take(name, sent, self[0].session.start(*inputs).results())

    async def agen(self, name: str, **options: Unpack[PartArguments]) -> Results:
        """`gen` for asyncio."""
        sent, inputs = self._sent, [branch._input(name, options) for branch in self]
        return self._take(name, sent, await _aresults(self[0].session, inputs))

    def select(
        self, name: str, choices: Iterable[str], *, per_token: bool = True
    ) -> list[Selection]:
        """`Program.select` of all, in one batch."""
        choices = _texts(choices)
        sent, inputs = self._sent, self._choices(choices)
        results = self[0].session.start(*inputs).results()
        return self._choose(name, sent, _scores(choices, results, per_token))

    async def aselect(
        self, name: str, choices: Iterable[str], *, per_token: bool = True
    ) -> list[Selection]:
        """`select` for asyncio."""
        choices = _texts(choices)
        sent, inputs = self._sent, await asyncio.to_thread(self._choices, choices)
        results = await _aresults(self[0].session, inputs)
        return self._choose(name, sent, _scores(choices, results, per_token))

    def fork(self, count: int) -> "Branches":
        """`count` branches of each, in one list."""
        return Branches(new for branch in self for new in branch.fork(count))

    def each(self, function: Callable[[Program], T]) -> list[T]:
        """Run the function on each branch, on threads side by side; its results in order."""
        with ThreadPoolExecutor(len(self)) as pool:
            return list(pool.map(function, self))

    @property
    def _sent(self) -> list[Mark]:
        return [branch._now for branch in self]

    def _take(self, name: str, sent: Sequence[Mark], results: Sequence[Result]) -> Results:
        for branch, before, result in zip(self, sent, results, strict=True):
            branch._take(name, before, result)
        return Results(results)

    def _choices(self, choices: Sequence[str]) -> list[Input]:
        """For each branch a request for each choice: the answer is it, with log-probabilities."""
        given = [branch._input("", {}) for branch in self]
        return [
            TextInput(
                prompt=encoded.ids,
                pictures=encoded.pictures,
                params=SCORED,
                response_format={"type": "choice", "choice": [choice]},
                adapter=before.adapter,
                reasons=False,
            )
            for before in given
            for encoded in [self[0].session.encode(before)]
            for choice in choices
        ]

    def _choose(
        self, name: str, sent: Sequence[Mark], scores: Sequence[Mapping[str, float]]
    ) -> list[Selection]:
        chosen = [Selection(max(score, key=score.__getitem__), score) for score in scores]
        for branch, before, selection in zip(self, sent, chosen, strict=True):
            branch._set(before.plus(selection.text).naming(name, selection.text), before)
        return chosen


def _texts(choices: Iterable[str]) -> list[str]:
    """The choices as a list; raises InvalidRequestError unless they are different texts."""
    is_many = isinstance(choices, Iterable) and not isinstance(choices, (str, bytes))
    texts = list(choices) if is_many else []
    if not texts or not all(isinstance(text, str) for text in texts) or len({*texts}) < len(texts):
        raise wrong_value("choices", texts or choices, "a list of different texts")
    return texts


def _scores(
    choices: Sequence[str], results: Sequence[Result], per_token: bool
) -> list[dict[str, float]]:
    """The scores of the choices for each program; `results` has those of one after the other's."""
    scores = []
    for result in results:
        if result.finish_reason is not FinishReason.STOP:
            raise InvalidRequestError("The context leaves no room for a choice.", param="choices")
        logprobs = [token.logprob for token in result.logprobs or ()]
        scores.append(sum(logprobs) / (len(logprobs) if per_token else 1))
    starts = range(0, len(scores), len(choices))
    return [dict(zip(choices, scores[start:], strict=False)) for start in starts]


async def _aresults(session: ModelSession, inputs: Iterable[Input]) -> list[Result]:
    """The results of all; the first error, or being cancelled, ends the rest."""
    tasks = [asyncio.ensure_future(last(adeltas(session.start, given))) for given in inputs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# -- many items ---------------------------------------------------------------------------------


def map_programs(
    run: Callable[[Item], T],
    items: Iterable[Item],
    *,
    key: Callable[[Item], Key] | None,
    path: str | Path | None,
    in_flight: int,
    show: Watch,
) -> list[T]:
    """As LLM.map; `run` runs the program of an item."""
    if (key is None) != (path is None):
        raise InvalidRequestError("map() takes key and path together.", param="key")
    check_int("in_flight", in_flight, low=1)
    every = list(items)
    keys: list[Key] = list(range(len(every))) if key is None else [key(item) for item in every]
    for item_key in keys:
        if type(item_key) not in (str, int):  # the file has them as JSON
            raise InvalidRequestError(
                f"key() gives {shown(item_key)} for an item; expected a text or a whole number.",
                param="key",
            )
    if len(set(keys)) < len(keys):
        raise InvalidRequestError("Two items have the same key.", param="key")
    values: dict[Key, Any] = {}

    def known(line: bytes) -> None:
        entry = json.loads(line)
        values[entry["key"]] = entry["value"]

    with nullcontext() if path is None else open_lines(Path(path), b'{"key": ', known) as file:
        todo = {
            item_key: item
            for item_key, item in zip(keys, every, strict=True)
            if item_key not in values
        }
        show(len(keys) - len(todo), len(keys))
        for done, (item_key, value) in enumerate(_finished(run, todo, in_flight), start=1):
            values[item_key] = value if file is None else _written(file, item_key, value)
            show(len(keys) - len(todo) + done, len(keys))
    return [values[item_key] for item_key in keys]


def _finished(
    run: Callable[[Item], T], todo: Mapping[Key, Item], in_flight: int
) -> Iterator[tuple[Key, T]]:
    """Keys and values as they come. After the first error no item begins; then it is raised."""
    waiting, running = iter(todo.items()), dict[Future[T], Key]()
    failed: Future[T] | None = None
    with ThreadPoolExecutor(in_flight) as pool:
        while True:
            if failed is None:
                for key, item in islice(waiting, in_flight - len(running)):
                    running[pool.submit(run, item)] = key
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                if future.exception() is None:
                    yield key, future.result()
                else:
                    failed = failed or future
    if failed is not None:
        failed.result()  # raises


def _written(file: BinaryIO, key: Key, value: object) -> Any:
    """The value as the file has it, so that a run that goes on returns the same."""
    line = json.dumps({"key": key, "value": value}, ensure_ascii=False)
    file.write(f"{line}\n".encode())
    file.flush()
    return json.loads(line)["value"]
