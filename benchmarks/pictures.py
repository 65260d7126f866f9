"""`bench pictures`: models that see, beside mlx-vlm in one run, and the answers of transformers.

Random weights of about 50 million parameters. mlx-vlm and transformers run in Pythons of their
own (`--peer-python`, `--reference-python`). All load the same folder, which the process of
transformers completes by its weights. mlx-vlm is used as its own chat uses it: with a cache of
features, and for each conversation with a prompt cache.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from benchmarks.engines import CLOCKS, Clock
from benchmarks.processes import ROOT, Peer
from benchmarks.seeing_models import MODELS, Seeing
from benchmarks.tables import Figures, medians
from mlxinfer import LLM, SamplingParams
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.session.arguments import chat_input

ANSWER = 8  # tokens
NEAR_TIE = 5e-3  # in log-probability: rounding may turn such a choice
REFERENCE = ROOT / "tests" / "data" / "pictures" / "answers.py"
PEER = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
from benchmarks.blas import preload_openblas
preload_openblas()
from mlx_vlm import load, stream_generate
from mlx_vlm.generate import PromptCacheState
from mlx_vlm.vision_cache import VisionFeatureCache
model, processor = load(sys.argv[1])
clock = getattr(time, sys.argv[3])
features, talks = VisionFeatureCache(), {}
print("true", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    state = talks.setdefault(asked["talk"], PromptCacheState())
    bias = {token: -1e9 for token in asked["never"]}
    begun, tokens = clock(), []
    for found in stream_generate(
        model, processor, asked["prompt"], image=asked["pictures"], max_tokens=asked["count"],
        temperature=0.0, logit_bias=bias, vision_cache=features, prompt_cache_state=state,
    ):
        if not tokens:
            first = clock() - begun
        if len(tokens) < found.generation_tokens:
            tokens.append(int(found.token))
    said = {"tokens": tokens, "first_s": first, "prompt": found.prompt_tokens}
    print(json.dumps(said | {"cached": found.cached_tokens}), flush=True)
"""

Messages = list[dict[str, Any]]
Asked = dict[str, Any]  # "tokens" and "first_s"; "prompt" and "cached" tokens
Part = str | Path


class How(NamedTuple):
    """How a model is measured.

    Attributes:
        runs: timed conversations, each with new pictures; the median counts.
        reference_python: the interpreter that has torch and transformers.
        peer_python: the interpreter that has mlx-vlm; None: mlxinfer is measured alone.
        cpu_time: time is what a process computed, not what passed.
    """

    runs: int
    reference_python: str
    peer_python: str | None
    cpu_time: bool


class Side:
    """One engine with a model."""

    def __init__(self, seeing: Seeing) -> None:
        self.seeing = seeing
        self.words = seeing.vocabulary

    def ask(self, talk: str, messages: Messages) -> Asked:
        """Answer a conversation."""
        raise NotImplementedError

    def said(self, tokens: list[int]) -> str:
        """The text of an answer."""
        return "".join([self.words[token] for token in tokens])


class Ours(Side):
    """mlxinfer with its defaults."""

    def __init__(self, seeing: Seeing, folder: Path, clock: Clock) -> None:
        super().__init__(seeing)
        self._clock = clock
        self.llm = LLM(folder, progress=False)
        bias = dict.fromkeys(seeing.never, -1e9)
        self.params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logit_bias=bias)

    def ids(self, messages: Messages) -> list[int]:
        """The tokens of a prompt."""
        given = chat_input("chat", messages, self.params, {})
        return self.llm._session.encode(given, bounded=False).ids

    def ask(self, talk: str, messages: Messages) -> Asked:
        """Answer a conversation; caches need no name of it."""
        begun, first = self._clock(), None
        for delta in self.llm.stream_chat(messages, self.params):
            first = first or self._clock() - begun
            result = delta.result
        assert result is not None
        return {
            "tokens": list(result.token_ids),
            "first_s": first,
            "prompt": result.prompt_tokens,
            "cached": result.cached_tokens,
        }


class Theirs(Side):
    """mlx-vlm in another process."""

    def __init__(self, seeing: Seeing, peer: Peer) -> None:
        super().__init__(seeing)
        self._peer = peer

    def ask(self, talk: str, messages: Messages) -> Asked:
        """Answer a conversation."""
        prompt, pictures = self._rendered(messages)
        asked = {"talk": talk, "prompt": prompt, "pictures": pictures, "count": ANSWER}
        self._peer.tell({**asked, "never": self.seeing.never})
        return self._peer.hear()

    def _rendered(self, messages: Messages) -> tuple[str, list[str]]:
        """As the chat template renders it, and the paths of pictures."""
        pieces, pictures = [], []
        for message in messages:
            pieces.append(f"<|im_start|>{message['role']} ")
            for part in message["content"]:
                is_text = part["type"] == "text"
                pieces.append(part["text"] if is_text else self.seeing.picture)
                pictures += [] if is_text else [part["image"]]
            pieces.append("<|im_end|>")
        return "".join([*pieces, "<|im_start|>assistant "]), pictures


def reference_answer(peer: Peer, ours: Ours, messages: Messages) -> tuple[list[int], list[float]]:
    """What transformers answers, and how far ahead of the second each token is."""
    pictures = [part["image"] for said in messages for part in said["content"] if "image" in part]
    asked = {"ids": ours.ids(messages), "pictures": pictures, "count": ANSWER}
    peer.tell({**asked, "never": ours.seeing.never})
    reply = peer.hear()
    return reply["tokens"], reply["leads"]


def is_right(tokens: list[int], expected: list[int], leads: list[float]) -> bool:
    """Whether an answer is that of transformers, up to a near tie."""
    differ = [i for i, pair in enumerate(zip(tokens, expected, strict=True)) if len({*pair}) > 1]
    return not differ or leads[differ[0]] < NEAR_TIE


# -- scenes -------------------------------------------------------------------------------------


class Album:
    """Pictures in files, each of noise of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def draw(self, width: int, height: int, mode: str = "RGB", **how: Any) -> Path:
        """A new picture; its name."""
        number = next(self._numbers)
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 256, (9, 12, len(mode)), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        path = self._folder / f"{number}.{'jpg' if 'exif' in how else 'png'}"
        image.save(path, **how)
        return path


def turned() -> Image.Exif:
    """EXIF data that say: turn by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def user(*parts: str | Path) -> dict[str, Any]:
    """A message with texts and pictures."""
    kinds = {True: "text", False: "image"}
    content = [
        {"type": kinds[isinstance(one, str)], kinds[isinstance(one, str)]: str(one)}
        for one in parts
    ]
    return {"role": "user", "content": content}


def answered(said: str) -> dict[str, Any]:
    """A message of the model."""
    return {"role": "assistant", "content": [{"type": "text", "text": said}]}


def all_talks(album: Album) -> dict[str, list[dict[str, Any]]]:
    """Conversations whose answers are compared with those of transformers: messages of the user."""
    draw = album.draw
    return {
        "a photo": [user(draw(320, 240), "What is on it"), user("And where")],
        "transparent": [user(draw(288, 256, "RGBA"), "What is on it")],
        "turned by EXIF": [user(draw(240, 360, exif=turned()), "What is on it")],
        "wide": [user("Read", draw(800, 40), "aloud")],
        "another picture later": [
            user(draw(320, 240), "What is on it"),
            user(draw(240, 320), "And on this one"),
        ],
        "four pictures": [
            user(*[draw(*size) for size in ((320, 240), (64, 48), (300, 300), (240, 320))], "Sort")
        ],
    }


def timed(side: Side, name: str, pictures: Sequence[Path]) -> dict[str, Figures]:
    """First tokens of a conversation, and of a prompt with four pictures.

    Args:
        side: answers.
        name: of the conversation.
        pictures: six that the side has not seen.
    """
    one, two, *four = pictures
    talk: Messages = []
    by_name = {}
    turns = {
        "one picture": user(one, "What is on it"),
        "second turn": user("And where"),
        "third turn, another picture": user(two, "And on this one"),
    }
    for label, message in turns.items():
        talk.append(message)
        said = by_name[label] = side.ask(name, talk)
        talk.append(answered(side.said(said["tokens"])))
    by_name["four pictures"] = side.ask(f"{name}, four", [user(*four, "Sort them")])
    return {
        label: {"first_s": said["first_s"], "computed": said["prompt"] - said["cached"]}
        for label, said in by_name.items()
    }


def right(
    sides: dict[str, Side], ours: Ours, reference: Peer, album: Album
) -> dict[str, dict[str, list[bool]]]:
    """For each conversation and side whether each turn's answer is that of transformers.

    Each turn goes on from what transformers answered before.
    """
    by_name: dict[str, dict[str, list[bool]]] = {}
    for name, messages in all_talks(album).items():
        talk: Messages = []
        by_name[name] = {side: [] for side in sides}
        for message in messages:
            talk.append(message)
            tokens, leads = reference_answer(reference, ours, talk)
            for label, side in sides.items():
                said = side.ask(name, talk)
                assert said["prompt"] == len(ours.ids(talk)), "both read the same tokens"
                by_name[name][label].append(is_right(said["tokens"], tokens, leads))
            talk.append(answered(ours.said(tokens)))
    return by_name


# -- report -------------------------------------------------------------------------------------


def measure(name: str, scratch: Path, how: How) -> dict[str, Any]:
    """All figures of a model, by side."""
    seeing, folder = MODELS[name], scratch / "model"
    seeing.write(folder)
    with ExitStack() as closing:
        reference = Peer(how.reference_python, str(REFERENCE), str(folder))
        closing.callback(reference.close)
        reference.hear()
        ours = Ours(seeing, folder, CLOCKS[how.cpu_time])
        closing.callback(ours.llm.close)
        sides: dict[str, Side] = {"mlxinfer": ours}
        if how.peer_python is not None:
            clock = CLOCKS[how.cpu_time].__name__
            peer = Peer(how.peer_python, "-c", PEER, str(folder), str(ROOT), clock)
            closing.callback(peer.close)
            peer.hear()
            sides["mlx-vlm"] = Theirs(seeing, peer)
        album = Album(scratch)
        answers = right(sides, ours, reference, album)  # and everything is warm now
        rounds: dict[str, list[dict[str, Figures]]] = {label: [] for label in sides}
        for number in range(how.runs):
            pictures = [album.draw(320, 240) for _ in range(6)]
            for label, side in list(sides.items())[:: -1 if number % 2 else 1]:
                rounds[label].append(timed(side, f"timed {number}", pictures))
    speed = {
        label: {scene: medians([item[scene] for item in value]) for scene in value[0]}
        for label, value in rounds.items()
    }
    return {"speed": speed, "right": answers}


def run(*, runs: int, reference_python: str, peer_python: str | None, cpu_time: bool) -> Report:
    """Measure both models; same arguments as `How`."""
    how = How(runs, reference_python, peer_python, cpu_time)
    collected = {}
    for name in MODELS:
        with TemporaryDirectory() as scratch:
            collected[name] = measure(name, Path(scratch), how)
    return Report(
        "pictures", [_speed_table(collected, cpu_time), _right_table(collected)], collected
    )


def _speed_table(actual: dict[str, Any], cpu_time: bool) -> Table:
    rows = []
    for name, figures in actual.items():
        for scene in figures["speed"]["mlxinfer"]:
            both = [side[scene] for side in figures["speed"].values()]
            seconds, tokens = ([one[key] for one in both] for key in ("first_s", "computed"))
            times = ratio(seconds[-1], seconds[0]) if len(both) > 1 else "-"
            cells = [" / ".join(f"{one:.2f}" for one in seconds), times]
            rows.append([name, scene, *cells, " / ".join(f"{one:.0f}" for one in tokens)])
    columns = ["", "", "first token (s)", "ratio", "prompt tokens computed"]
    note = "Seconds of CPU time." if cpu_time else ""
    return Table(f"{' / '.join(_sides(actual))}: first tokens", columns, rows, note)


def _right_table(actual: dict[str, Any]) -> Table:
    rows = []
    for name, figures in actual.items():
        for talk, sides in figures["right"].items():
            wrong = [f"{turns.count(False)} of {len(turns)}" for turns in sides.values()]
            rows.append([name, talk, *wrong])
    note = f"Greedy answers of {ANSWER} tokens; near ties, up to {NEAR_TIE} in log-probability, "
    return Table(
        "Answers that are not those of transformers",
        ["", "", *_sides(actual)],
        rows,
        f"{note}count as right.",
    )


def _sides(figures: dict[str, Any]) -> list[str]:
    return list(next(iter(figures.values()))["speed"])
