"""What people send to a server, again and again with the same beginnings. Knows no engine."""

from collections.abc import Iterator
from dataclasses import dataclass

from .checkpoints import random_prompt
from .served import Ask, Clock, Served, Server, serve


@dataclass(frozen=True, slots=True)
class Sum:
    """Several `Served` taken together."""

    prompt_tokens: int
    computed: int
    peak_kv_bytes: int
    mean_first_s: float

    @property
    def reused_share(self) -> float:
        """Of prompt tokens, those that were not computed."""
        return 1 - self.computed / self.prompt_tokens


def total(served: list[Served]) -> Sum:
    """Tokens added up, the highest peak, the mean of all first tokens."""
    firsts = [answer.first_s for each in served for answer in each.answers.values()]
    return Sum(
        sum(each.prompt_tokens for each in served),
        sum(each.computed for each in served),
        max(each.peak_kv_bytes for each in served),
        sum(firsts) / len(firsts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many, and how many tokens each."""

    conversations: int = 16
    turns: int = 3
    opening: int = 240  # of a conversation
    message: int = 32  # of a later one
    answer: int = 16
    cold: tuple[int, ...] = (6, 16)
    system: int = 960
    question: int = 16  # behind it
    agents: int = 12
    steps: int = 4
    catalogue: int = 3300
    task: int = 32
    result: int = 32  # of a tool
    document: int = 300
    questions: int = 4


class Prompts:
    """Random messages, no two alike."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._seeds = iter(range(1 << 30))

    def message(self, length: int) -> list[int]:
        """`length` token ids."""
        return random_prompt(length, self._vocab, next(self._seeds))


def conversations(server: Server, scale: Scale, prompts: Prompts, clock: Clock) -> list[Sum]:
    """Round robin: every conversation has its first turn, then each its second. One Sum a turn."""
    histories: list[list[int]] = [[] for _ in range(scale.conversations)]
    turns = []
    for turn in range(scale.turns):
        served = []
        for index, history in enumerate(histories):
            history += prompts.message(scale.message if turn else scale.opening)
            served.append(_ask_one(server, f"{turn}/{index}", history, scale.answer, clock))
        turns.append(total(served))
    return turns


def cold_start(server: Server, count: int, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """`count` requests at once, all new, that begin with the same system prompt."""
    system = prompts.message(scale.system)
    asks = [
        Ask(str(i), [("system", system), ("user", prompts.message(scale.question))], scale.answer)
        for i in range(count)
    ]
    return total([serve(server, asks, clock)])


def agents(server: Server, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """A fleet with one tool catalogue; all take a step at once, and each gets its tool's result."""
    catalogue = prompts.message(scale.catalogue)
    tasks = [prompts.message(scale.task) for _ in range(scale.agents)]
    served = []
    for step in range(scale.steps):
        asks = [
            Ask(f"{step}/{index}", segments, scale.answer)
            for index, segments in enumerate(_agent_prompts(step, catalogue, tasks))
        ]
        served.append(serve(server, asks, clock))
        for index, task in enumerate(tasks):
            task += served[-1].answers[f"{step}/{index}"].token_ids
            task += prompts.message(scale.result)
    return total(served)


def _agent_prompts(
    step: int, catalogue: list[int], tasks: list[list[int]]
) -> Iterator[list[tuple[str, list[int]]]]:
    """mlx-lm's server knows segments only where a user spoke last; later a tool did."""
    for task in tasks:
        if step:
            yield [("assistant", catalogue + task)]
        else:
            yield [("system", catalogue), ("user", list(task))]


def edited(server: Server, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """A conversation whose last message is written anew; the Sum is of the edited turn alone."""
    history: list[int] = []
    before: list[int] = []
    for turn in range(scale.turns):
        before = list(history)
        history += prompts.message(scale.message if turn else scale.opening)
        _ask_one(server, str(turn), history, scale.answer, clock)
    again = before + prompts.message(scale.message)
    return total([_ask_one(server, "edited", again, scale.answer, clock)])


def document(server: Server, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """Questions about one document, each with it in one message; the Sum is of all but the first.

    Where the document ends is not the end of a segment: only tokens show that it is the same.
    """
    text = prompts.message(scale.document)
    served = [
        _ask_one(server, str(i), text + prompts.message(scale.message), scale.answer, clock)
        for i in range(scale.questions)
    ]
    return total(served[1:])


def _ask_one(
    server: Server, name: str, history: list[int], max_tokens: int, clock: Clock
) -> Served:
    """Ask, and append the answer to the history."""
    served = serve(server, [Ask(name, [("user", list(history))], max_tokens)], clock)
    history += served.answers[name].token_ids
    return served
