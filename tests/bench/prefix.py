"""`bench prefix`: prompt tokens computed and reused, KV held, time to the first token.

Prompts that begin as earlier or concurrent ones did, answered by both engines with their prompt
caches. Knows scenes and engines; no cache.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.bench.report import Report, Table
from mlxinfer.models import load
from tests.bench.checkpoints import (
    FLEET,
    MIDDLE,
    TINY_WINDOWED,
    TWO_LAYERS,
    WINDOWED,
    Dense,
    random_prompt,
    write_checkpoint,
)
from tests.bench.engines import Ask, Clock, Engine, OurEngine, Served, greedy, serve
from tests.bench.peer import PeerEngine
from tests.bench.tables import SIDES, named, sides


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


def conversations(engine: Engine, scale: Scale, prompts: Prompts, clock: Clock) -> list[Sum]:
    """Round robin: every conversation has its first turn, then each its second. One Sum a turn."""
    histories: list[list[int]] = [[] for _ in range(scale.conversations)]
    turns = []
    for turn in range(scale.turns):
        served = []
        for index, history in enumerate(histories):
            history += prompts.message(scale.message if turn else scale.opening)
            served.append(_ask_one(engine, f"{turn}/{index}", history, scale.answer, clock))
        turns.append(total(served))
    return turns


def cold_start(engine: Engine, count: int, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """`count` requests at once, all new, that begin with the same system prompt."""
    system = prompts.message(scale.system)
    asks = [
        Ask(
            str(i),
            [("system", system), ("user", prompts.message(scale.question))],
            greedy(scale.answer),
        )
        for i in range(count)
    ]
    return total([serve(engine, asks, clock)])


def agents(engine: Engine, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """A fleet with one tool catalogue; all take a step at once, and each gets its tool's result."""
    catalogue = prompts.message(scale.catalogue)
    tasks = [prompts.message(scale.task) for _ in range(scale.agents)]
    served = []
    for step in range(scale.steps):
        asks = [
            Ask(f"{step}/{index}", segments, greedy(scale.answer))
            for index, segments in enumerate(_agent_prompts(step, catalogue, tasks))
        ]
        served.append(serve(engine, asks, clock))
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


def edited(engine: Engine, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """A conversation with its last message written anew; the Sum is of the edited turn alone."""
    history: list[int] = []
    before: list[int] = []
    for turn in range(scale.turns):
        before = list(history)
        history += prompts.message(scale.message if turn else scale.opening)
        _ask_one(engine, str(turn), history, scale.answer, clock)
    again = before + prompts.message(scale.message)
    return total([_ask_one(engine, "edited", again, scale.answer, clock)])


def document(engine: Engine, scale: Scale, prompts: Prompts, clock: Clock) -> Sum:
    """Questions about one document, each with it in one message; the Sum is of all but the first.

    Where the document ends is not the end of a segment: only tokens show that it is the same.
    """
    text = prompts.message(scale.document)
    served = [
        _ask_one(engine, str(i), text + prompts.message(scale.message), scale.answer, clock)
        for i in range(scale.questions)
    ]
    return total(served[1:])


def _ask_one(
    engine: Engine, name: str, history: list[int], max_tokens: int, clock: Clock
) -> Served:
    """Ask, and append the answer to the history."""
    served = serve(engine, [Ask.of(name, list(history), max_tokens)], clock)
    history += served.answers[name].token_ids
    return served


SMALL = Scale(
    conversations=3, opening=80, cold=(3,), system=96, agents=3, steps=2, catalogue=160, answer=8
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A name, a model, and what to play; each on engines of its own."""

    label: str
    dense: Dense
    play: Callable[[Engine, Prompts, Clock], dict[str, Sum]]


def all_scenes(scale: Scale, *, small: bool) -> list[Scene]:
    """In the order of the report."""
    middle, fleet = (TWO_LAYERS, TWO_LAYERS) if small else (MIDDLE, FLEET)
    windowed = TINY_WINDOWED if small else WINDOWED
    turns = f"{scale.conversations} conversations in turn"

    def talk(engine: Engine, prompts: Prompts, clock: Clock) -> dict[str, Sum]:
        each = conversations(engine, scale, prompts, clock)
        return {f"{turns}, turn {turn}": found for turn, found in enumerate(each, start=1)}

    found = [Scene(turns, middle, talk)]
    for count in scale.cold:
        label = f"{count} at once, new, {scale.system} tokens shared"
        found.append(Scene(label, middle, _cold(label, count, scale)))
    label = f"{scale.agents} agents x {scale.steps} steps, {scale.catalogue} shared"
    found.append(Scene(label, fleet, _one(label, agents, scale)))
    for dense, suffix in ((middle, ""), (windowed, f", window {windowed.window}")):
        for label, play in (
            ("last message edited", edited),
            ("more questions, same document", document),
        ):
            found.append(Scene(label + suffix, dense, _one(label + suffix, play, scale)))
    return found


def _one(
    label: str, play: Callable[[Engine, Scale, Prompts, Clock], Sum], scale: Scale
) -> Callable[[Engine, Prompts, Clock], dict[str, Sum]]:
    return lambda engine, prompts, clock: {label: play(engine, scale, prompts, clock)}


def _cold(
    label: str, count: int, scale: Scale
) -> Callable[[Engine, Prompts, Clock], dict[str, Sum]]:
    return lambda engine, prompts, clock: {label: cold_start(engine, count, scale, prompts, clock)}


def run(*, small: bool = False, cpu_time: bool = False, peer: bool = True) -> Report:
    """Every scene, mlxinfer first.

    Args:
        small: models and counts of seconds.
        cpu_time: time is what the process computed, not what passed: for a machine that others use.
        peer: also mlx-lm.
    """
    scale = SMALL if small else Scale()
    clock = time.process_time if cpu_time else time.perf_counter
    found: dict[str, list[Sum]] = {}
    with TemporaryDirectory() as scratch:
        for scene in all_scenes(scale, small=small):
            folder = Path(scratch) / f"{scene.dense.hidden}-{scene.dense.config()['model_type']}"
            if not folder.exists():
                write_checkpoint(folder, scene.dense)
            for make in _makers(folder, peer=peer):
                _warm(make(), scene.dense)
                played = scene.play(make(), Prompts(scene.dense.vocab), clock)
                for label, each in played.items():
                    found.setdefault(label, []).append(each)
    data = {
        "scale": asdict(scale),
        "scenes": [
            {"scene": label, **named([asdict(each) for each in sums])}
            for label, sums in found.items()
        ],
    }
    return Report("prefix", [_tokens_table(found, scale), _cost_table(found, cpu_time)], data)


def _makers(folder: Path, *, peer: bool) -> list[Callable[[], Engine]]:
    model = load(folder)
    makers: list[Callable[[], Engine]] = [lambda: OurEngine(model)]
    if peer:
        peer_model = load_peer_model(folder)
        makers.append(lambda: PeerEngine(peer_model))
    return makers


def _warm(engine: Engine, dense: Dense) -> None:
    """First calls load and allocate what later ones find."""
    serve(engine, [Ask.of("warm", Prompts(dense.vocab).message(40), 4)])


def _tokens_table(found: dict[str, list[Sum]], scale: Scale) -> Table:
    rows = []
    for label, sums in found.items():
        row = [label, f"{sums[0].prompt_tokens:,}", *sides([each.computed for each in sums])]
        rows.append([*row, " / ".join(f"{each.reused_share:.0%}" for each in sums)])
    note = (
        f"Conversations: {scale.opening} tokens, then {scale.message} a turn; system prompts are "
        f"followed by {scale.question}; agents have a task of {scale.task} and tools that return "
        f"{scale.result}; answers have {scale.answer}. Reused: the share of prompt tokens that no "
        "forward pass saw."
    )
    note += " mlx-lm: BatchGenerator and LRUPromptCache (10 entries), as its server uses them."
    columns = ["", "prompt tokens", *SIDES, "reused"]
    return Table("Prompt tokens computed and reused", columns, rows, note)


def _cost_table(found: dict[str, list[Sum]], cpu_time: bool) -> Table:
    rows = []
    for label, sums in found.items():
        firsts = sides([each.mean_first_s for each in sums], ",.3f")
        rows.append([label, *firsts, *sides([each.peak_kv_bytes / 1e6 for each in sums], ",.1f")])
    columns = [
        "",
        *(f"{side}, {what}" for what in ("first token (s)", "KV (MB)") for side in SIDES),
    ]
    note = "First token: the mean of all requests. KV: the most that was held at a time."
    note += " Seconds of CPU time." if cpu_time else ""
    return Table("Time to the first token, and KV held", columns, rows, note)
