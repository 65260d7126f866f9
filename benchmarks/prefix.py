"""`bench prefix`: prompt tokens computed and reused, KV held, time to the first token.

Prompts that begin as earlier or concurrent ones did, answered by both engines with their prompt
caches. Knows scenes and engines; no cache.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.checkpoints import (
    FLEET,
    MIDDLE,
    TINY_WINDOWED,
    TWO_LAYERS,
    WINDOWED,
    Dense,
    random_prompt,
    write_checkpoint,
)
from benchmarks.engines import CLOCKS, Ask, Clock, Engine, Loaded, Segment, Served, greedy, serve
from benchmarks.tables import SIDES, Figures, named, sides
from mlxinfer import SamplingParams
from mlxinfer.bench.report import Report, Table


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


SMALL = Scale(
    conversations=3, opening=80, cold=(3,), system=96, agents=3, steps=2, catalogue=160, answer=8
)


class Player:
    """Plays scenes on an engine, with random messages of which no two are alike."""

    def __init__(self, engine: Engine, vocab: int, scale: Scale, clock: Clock) -> None:
        self.engine, self.scale = engine, scale
        self._vocab, self._clock = vocab, clock
        self._seeds = iter(range(1 << 30))

    def message(self, length: int) -> list[int]:
        """`length` token ids."""
        return random_prompt(length, self._vocab, next(self._seeds))

    def ask(self, prompts: list[list[Segment]], params: SamplingParams | None = None) -> Served:
        """Prompts that come at once; they are named by their number. Answers are greedy."""
        params = params or greedy(self.scale.answer)
        asks = [Ask(str(i), segments, params) for i, segments in enumerate(prompts)]
        return serve(self.engine, asks, self._clock)

    def ask_one(self, history: list[int]) -> Served:
        """Ask, and append the answer to the history."""
        served = self.ask([[("user", list(history))]])
        history += served.answers["0"].token_ids
        return served


def total(served: list[Served]) -> Figures:
    """Tokens added up, the highest peak, the mean of all first tokens."""
    firsts = [answer.first_s for item in served for answer in item.answers.values()]
    return {
        "prompt_tokens": sum(item.prompt_tokens for item in served),
        "computed": sum(item.computed for item in served),
        "peak_kv_bytes": max(item.peak_kv_bytes for item in served),
        "mean_first_s": sum(firsts) / len(firsts),
    }


def conversations(player: Player) -> list[Figures]:
    """Round robin: each conversation has its first turn, then each its second. Of each turn."""
    scale = player.scale
    histories: list[list[int]] = [[] for _ in range(scale.conversations)]
    turns = []
    for turn in range(scale.turns):
        served = []
        for history in histories:
            history += player.message(scale.message if turn else scale.opening)
            served.append(player.ask_one(history))
        turns.append(total(served))
    return turns


def cold_start(player: Player, count: int) -> list[Figures]:
    """`count` requests at once, all new, that begin with the same system prompt."""
    system = player.message(player.scale.system)
    questions = [player.message(player.scale.question) for _ in range(count)]
    return [total([player.ask([[("system", system), ("user", ids)] for ids in questions])])]


def agents(player: Player) -> list[Figures]:
    """A fleet with one tool catalogue; all take a step at once, and each gets its tool's result.

    mlx-lm's server knows segments only where a user spoke last; later a tool did.
    """
    scale = player.scale
    catalogue = player.message(scale.catalogue)
    tasks = [player.message(scale.task) for _ in range(scale.agents)]
    first: list[list[Segment]] = [[("system", catalogue), ("user", list(task))] for task in tasks]
    served = [player.ask(first)]
    for _ in range(scale.steps - 1):
        for index, task in enumerate(tasks):
            task += served[-1].answers[str(index)].token_ids
            task += player.message(scale.result)
        served.append(player.ask([[("assistant", catalogue + task)] for task in tasks]))
    return [total(served)]


def edited(player: Player) -> list[Figures]:
    """A conversation with its last message written anew: the edited turn alone."""
    history: list[int] = []
    before: list[int] = []
    for turn in range(player.scale.turns):
        before = list(history)
        history += player.message(player.scale.message if turn else player.scale.opening)
        player.ask_one(history)
    return [total([player.ask_one(before + player.message(player.scale.message))])]


def document(player: Player) -> list[Figures]:
    """Questions about one document, each with it in one message: all but the first.

    Where the document ends is not the end of a segment: only tokens show that it is the same.
    """
    text = player.message(player.scale.document)
    served = [
        player.ask_one(text + player.message(player.scale.message))
        for _ in range(player.scale.questions)
    ]
    return [total(served[1:])]


def tree_of_thoughts(player: Player) -> list[Figures]:
    """Three thoughts on a question, three ways on from each, and a vote on all nine.

    Branches of one place have the same prompt and draw different answers.
    """
    scale = player.scale
    texts = [player.message(scale.opening)] * 3
    served = []
    for branches in (3, 1, 1):
        drawn = SamplingParams(max_tokens=scale.answer, ignore_eos=True, temperature=1.0)
        served.append(player.ask([[("user", list(text))] for text in texts], drawn))
        asks = player.message(scale.question)  # "Go on", then "Is this right?"
        answers = [served[-1].answers[str(n)].token_ids for n in range(len(texts))]
        texts = [t + a + asks for t, a in zip(texts, answers, strict=True) for _ in range(branches)]
    return [total(served)]


Scene = tuple[list[str], Dense, Callable[[Player], list[Figures]]]  # labels of what it gives


def all_scenes(scale: Scale, *, small: bool) -> list[Scene]:
    """In the order of the report; each is played on engines of its own."""
    middle, fleet = (TWO_LAYERS, TWO_LAYERS) if small else (MIDDLE, FLEET)
    windowed = TINY_WINDOWED if small else WINDOWED
    turns = f"{scale.conversations} conversations in turn, turn"
    result: list[Scene] = [
        ([f"{turns} {turn}" for turn in range(1, scale.turns + 1)], middle, conversations)
    ]
    for count in scale.cold:
        label = f"{count} at once, new, {scale.system} tokens shared"
        result.append(([label], middle, partial(cold_start, count=count)))
    label = f"{scale.agents} agents x {scale.steps} steps, {scale.catalogue} shared"
    result.append(([label], fleet, agents))
    for dense, suffix in ((middle, ""), (windowed, f", window {windowed.window}")):
        result.append(([f"tree of 3 x 3 thoughts with votes{suffix}"], dense, tree_of_thoughts))
        result.append(([f"last message edited{suffix}"], dense, edited))
        result.append(([f"more questions, same document{suffix}"], dense, document))
    return result


def run(*, small: bool, cpu_time: bool, peer: bool) -> Report:
    """Every scene, mlxinfer first.

    Args:
        small: models and counts of seconds.
        cpu_time: time is what the process computed, not what passed: for a machine that others use.
        peer: also mlx-lm.
    """
    scale = SMALL if small else Scale()
    collected: dict[str, list[Figures]] = {}
    with TemporaryDirectory() as scratch:
        for labels, dense, play in all_scenes(scale, small=small):
            folder = Path(scratch) / f"{dense.hidden}-{dense.config()['model_type']}"
            if not folder.exists():
                write_checkpoint(folder, dense)
            loaded = Loaded.of(folder, peer=peer)
            for engine in loaded.engines():  # first calls load and allocate what later ones find
                serve(engine, [Ask.of("warm", random_prompt(40, dense.vocab, 0), 4)])
            for engine in loaded.engines():
                played = play(Player(engine, dense.vocab, scale, CLOCKS[cpu_time]))
                for label, value in zip(labels, played, strict=True):
                    collected.setdefault(label, []).append(value)
    scenes = [{"scene": label, **named(value)} for label, value in collected.items()]
    tables = [_tokens_table(collected, scale), _cost_table(collected, cpu_time)]
    return Report("prefix", tables, {"scale": asdict(scale), "scenes": scenes})


def _tokens_table(figures: dict[str, list[Figures]], scale: Scale) -> Table:
    rows = []
    for label, both in figures.items():
        row = [label, f"{both[0]['prompt_tokens']:,}", *sides([side["computed"] for side in both])]
        reused = [1 - side["computed"] / side["prompt_tokens"] for side in both]
        rows.append([*row, " / ".join(f"{share:.0%}" for share in reused)])
    note = (
        f"Conversations: {scale.opening} tokens, then {scale.message} a turn; system prompts, and "
        f"branches of a tree, are followed by {scale.question}; agents have a task of {scale.task} "
        f"and tools that return {scale.result}; answers have {scale.answer}. Reused: the share of "
        "prompt tokens that no forward pass saw. mlx-lm: BatchGenerator and LRUPromptCache (10 "
        "entries), as its server uses them."
    )
    columns = ["", "prompt tokens", *SIDES, "reused"]
    return Table("Prompt tokens computed and reused", columns, rows, note)


def _cost_table(figures: dict[str, list[Figures]], cpu_time: bool) -> Table:
    rows = []
    for label, both in figures.items():
        firsts = sides([item["mean_first_s"] for item in both], ",.3f")
        held = sides([item["peak_kv_bytes"] / 1e6 for item in both], ",.1f")
        rows.append([label, *firsts, *held])
    columns = [f"{side}, {what}" for what in ("first token (s)", "KV (MB)") for side in SIDES]
    note = "First token: the mean of all requests. KV: the most that was held at a time."
    note += " Seconds of CPU time." if cpu_time else ""
    return Table("Time to the first token, and KV held", ["", *columns], rows, note)
