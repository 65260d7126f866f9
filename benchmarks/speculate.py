"""`bench speculate`: what proposals give, counted and timed.

Two questions. How many tokens does a step give with the bundled draft? How much faster is a model
with a far smaller draft? The timed pair is the demo in float32, where MLX on a CPU reads weights
once for all rows of a step, as a GPU does, with layers added that change nothing (their outputs are
zero) and take time: the answers are the demo's, and the acceptance is that of its draft.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx

from benchmarks.tables import Figures
from mlxinfer import hub
from mlxinfer.bench.report import Report, Table, ratio
from mlxinfer.core import SamplingParams
from mlxinfer.outputs import Result
from mlxinfer.session.inputs import ChatInput, TextInput
from mlxinfer.session.options import EngineOptions
from mlxinfer.session.session import Session

PROMPTS = (
    "Explain paged attention.",
    "Write a short poem about rain.",
    "How do I install the library?",
    "What is a KV cache?",
    "Give me JSON for a user named Ada aged 36.",
    "Tell me a story about a dog.",
    "What is speculative decoding?",
    "Why is the sky blue?",
)
LAYERS = 60  # that are added: the model is some 150 times as large as its draft
ADVERSARIAL = 200  # tokens


def run(*, small: bool) -> Report:
    """All of it; without the longer measurements where it is to be `small`."""
    tokens = 16 if small else 96
    demo, draft = hub.resolve("demo"), hub.resolve("demo-draft")
    counted = measure_pair(demo, draft, tokens=tokens, batches=(1, 8))
    with TemporaryDirectory() as folder:
        pair = write_pair(Path(folder), LAYERS // 10 if small else LAYERS)
        timed = measure_pair(
            pair.model, pair.draft, tokens=tokens, batches=(1,) if small else (1, 4)
        )
        adversarial = measure_adversarial(pair, tokens=20 if small else ADVERSARIAL)
    tables = [_ways_table("The demo and its draft", counted), _pair_table(timed, adversarial)]
    data = {"counted": counted, "pair": timed, "adversarial": adversarial}
    return Report("speculate", tables, data)


# -- answers, counted --------------------------------------------------------------------------


@dataclass(slots=True)
class CountedAnswers:
    """The answers of one way of proposing."""

    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: int = 0  # after the first of each answer
    num_steps: int = 0  # of one request
    decode_s: float = 0.0


@contextmanager
def open_session(folder: Path, options: EngineOptions) -> Iterator[Session]:
    """A session of its own, without a prefix cache."""
    session = Session("bench", folder, replace(options, prefix_cache=False))
    try:
        yield session
    finally:
        session.close()


def answers_of(
    folder: Path, options: EngineOptions, texts: Sequence[str], batch: int, tokens: int
) -> CountedAnswers:
    """Answer each text, `batch` of them at once, in an engine of its own."""
    outcome = CountedAnswers()
    given = [text for text in texts for _ in range(-(-batch // len(texts)))]
    params = SamplingParams(max_tokens=tokens)
    with open_session(folder, options) as session:
        for start in range(0, len(given), batch):
            group = given[start : start + batch]
            chats = session.tokenizer.template is not None
            results = session.start(
                *[
                    ChatInput(messages=[{"role": "user", "content": text}], params=params)
                    if chats
                    else TextInput(prompt=text, params=params)
                    for text in group
                ]
            ).results()
            outcome.decode_s += max(result.timing.decode_s for result in results)
            for result in results:
                after_first = max(len(result.token_ids) - 1, 0)
                outcome.token_ids.append(tuple(result.token_ids))
                outcome.num_tokens += after_first
                outcome.num_steps += after_first - result.timing.accepted
    return outcome


# -- a model and its draft ----------------------------------------------------------------------


class Pair(NamedTuple):
    """Folders of a model, its draft, and a draft that is always wrong."""

    model: Path
    draft: Path
    wrong: Path


def write_pair(folder: Path, layers: int) -> Pair:
    """The demo in float32 with layers that change nothing, its draft, and a draft of noise."""
    demo, draft = hub.resolve("demo"), hub.resolve("demo-draft")
    tensors, small = _plain_tensors(demo), _plain_tensors(draft)
    first = _config(demo)["num_hidden_layers"]
    for added in range(layers):
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            layer = name.replace("layers.0.", f"layers.{first + added}.")
            tensors[layer] = mx.zeros_like(tensors[name]) if silent else tensors[name]
    key = mx.random.key(0)
    noise = {n: mx.random.normal(a.shape, key=key) * 0.1 for n, a in small.items()}
    return Pair(
        _write(folder / "model", demo, tensors, first + layers),
        _write(folder / "draft", draft, small, None),
        _write(folder / "wrong", draft, noise, None),
    )


def _plain_tensors(folder: Path) -> dict[str, mx.array]:
    """The weights of a quantised checkpoint in float32."""
    stored: Any = mx.load(str(folder / "model.safetensors"))
    how = _config(folder)["quantization"]
    plain: dict[str, mx.array] = {}
    for name, array in stored.items():
        base = name.removesuffix(".weight")
        if f"{base}.scales" in stored and name.endswith(".weight"):
            scales, biases = stored[f"{base}.scales"], stored[f"{base}.biases"]
            array = mx.dequantize(array, scales, biases, how["group_size"], how["bits"])
        if not name.endswith((".scales", ".biases")):
            plain[name] = array.astype(mx.float32)
    return plain


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def _write(folder: Path, source: Path, tensors: dict[str, mx.array], layers: int | None) -> Path:
    shutil.copytree(source, folder)
    config = {**_config(source), "torch_dtype": "float32"}
    del config["quantization"]
    if layers is not None:
        config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    return folder


def answered(
    folder: Path, options: EngineOptions, prompts: Sequence[str | list[int]], tokens: int
) -> list[Result]:
    """Answers of exactly `tokens` tokens to prompts that come at once."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with open_session(folder, options) as session:
        return session.start(*(TextInput(prompt=p, params=params) for p in prompts)).results()


# -- how fast -----------------------------------------------------------------------------------


def measure_pair(
    model: Path, draft: Path, *, tokens: int, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Rates without proposals, with four always, and with as many as are chosen."""
    ways = {
        "off": EngineOptions(speculate="off"),
        "draft 4": EngineOptions(speculate="draft", draft=draft, max_draft=4, fixed_proposals=True),
        "draft chosen": EngineOptions(speculate="draft", draft=draft),
    }
    collected = []
    for batch in batches:
        plain: list[tuple[int, ...]] = []
        for way, options in ways.items():
            answers = answers_of(model, options, PROMPTS, batch, tokens)
            plain = plain or answers.token_ids
            collected.append(
                {
                    "way": way,
                    "batch": batch,
                    "tokens_per_step": answers.num_tokens / answers.num_steps,
                    "tokens_per_s": answers.num_tokens / answers.decode_s,
                    "same": sum(a == b for a, b in zip(answers.token_ids, plain, strict=True)),
                    "answers": len(plain),
                }
            )
    return collected


def measure_adversarial(pair: Pair, *, tokens: int) -> Figures:
    """Seconds of one answer without proposals and with a draft that is always wrong, in turns."""
    seconds: dict[str, list[float]] = {"off": [], "wrong draft": []}
    wrong = EngineOptions(speculate="draft", draft=pair.wrong)
    ways = {"off": EngineOptions(speculate="off"), "wrong draft": wrong}
    accepted = 0
    for order in (("off", "wrong draft"), ("wrong draft", "off")):
        for way in order:
            (result,) = answered(pair.model, ways[way], PROMPTS[:1], tokens)
            seconds[way].append(result.timing.decode_s)
            accepted += result.timing.accepted
    return {
        "off_s": min(seconds["off"]),
        "wrong_draft_s": min(seconds["wrong draft"]),
        "accepted": accepted,
        "tokens": tokens,
    }


# -- what is shown ------------------------------------------------------------------------------


def _pair_table(timed: Sequence[dict[str, Any]], adversarial: Figures) -> Table:
    wrong = ratio(adversarial["off_s"], adversarial["wrong_draft_s"])
    note = f"{adversarial['tokens']} tokens with a draft that is always wrong: {wrong} of off."
    return _ways_table("A float32 model with a draft far smaller", timed, note)


def _ways_table(title: str, cells: Sequence[dict[str, Any]], note: str = "") -> Table:
    off = {cell["batch"]: cell["tokens_per_s"] for cell in cells if cell["way"] == "off"}
    rows = [
        [
            cell["way"],
            str(cell["batch"]),
            f"{cell['tokens_per_step']:.2f}",
            f"{cell['tokens_per_s']:.1f}",
            ratio(cell["tokens_per_s"], off[cell["batch"]]),
            f"{cell['same']} of {cell['answers']}",
        ]
        for cell in cells
    ]
    columns = ["proposals", "at once", "tokens/step", "tokens/s", "x off", "same"]
    return Table(title, columns, rows, note)
