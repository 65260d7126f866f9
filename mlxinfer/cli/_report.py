"""`doctor --report`: checks, kernels, speed, tokens and memory of this machine, in one file.

The parts of a report run one after the other. A part that raises becomes an entry with its error,
and the others go on. The file is written before and after each part: if the machine crashes, the
file has what was found, and names the part that was running.
"""

import asyncio
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from .. import hub
from ..backend import command_buffer_limits
from ..bench.report import Report, Table, describe_machine, markdown
from ..bench.speed import has_room, measure, prompts, token_times
from ..engine.kernels import KERNELS_VARIABLE
from ..errors import InvalidRequestError, MlxinferError
from ..files import write_whole
from ..llm import LLM
from ..memory import human_bytes, total_memory_bytes
from ..memory.roofline import Machine, estimate, machine
from ..session.options import PAGES_VARIABLE
from ._inspect import Summary, summarise
from ._kernels import kernel_report
from ._model import fetch
from ._output import note

Data = dict[str, Any]
Part = Callable[[], Data]
COUNTERS = (
    "steps", "tokens_computed", "tokens_sampled", "pages_sealed", "bytes_copied", "bytes_grown",
    "preemptions", "step_failures",
)  # fmt: skip
PROMPTS = ("Once upon a time", "What is a KV cache?", "1, 2, 3, 4,", "The page of a book")
MEMORY = {"active": mx.get_active_memory, "cache": mx.get_cache_memory, "peak": mx.get_peak_memory}
BATCHES = (1, 8)  # requests at once
SOAKING = 4  # requests at once, of the soak
BITS, GROUP = 4, 64  # of random weights, as in the bundled model


class RandomModel(NamedTuple):
    """The sizes of a Qwen3 by their names in config.json, and the prompt lengths to measure."""

    name: str
    contexts: tuple[int, ...]
    sizes: dict[str, int]


def _sizes(*values: int) -> dict[str, int]:
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a report measures."""

    models: tuple[RandomModel, ...]  # of random weights, each measured in a part of its own
    tokens: int  # of each answer
    steps: int  # of greedy decoding with and without kernels
    long: int  # tokens of a prompt before such steps
    soak_s: float  # seconds of requests while memory is watched
    speed_s: float  # no measurement of a model begins after this time


class GreedyAnswers(NamedTuple):
    """Tokens of answers that were computed together, and how long that took."""

    tokens: list[list[int]]
    seconds: float


SMALL = RandomModel("0.6B, random", (512, 4096), _sizes(1024, 3072, 28, 16, 8, 128, 151_936, True))
LARGE = RandomModel("8B, random", (512, 2048), _sizes(4096, 12_288, 36, 32, 8, 128, 151_936, False))
TINY = RandomModel("tiny, random", (128, 512), _sizes(256, 768, 4, 4, 2, 64, 4096, True))
LARGE_MEMORY, LARGE_DISK = 30 << 30, 12 * 10**9  # bytes that LARGE needs to be measured too
ON_CPU = Extent((TINY,), 16, 500, 600, 5, 30)


def extent_here() -> Extent:
    """Real shapes on a GPU, and tiny ones on MLX's CPU backend."""
    if not mx.metal.is_available():
        return ON_CPU
    free = shutil.disk_usage(tempfile.gettempdir()).free
    large = total_memory_bytes() >= LARGE_MEMORY and free >= LARGE_DISK
    models = (SMALL, LARGE) if large else (SMALL,)
    return Extent(models, 64, 500, 4_200, 60, 120)


# -- the report -------------------------------------------------------------------------------


def make_report(path: Path, checks: Part, model: str | None = None) -> Data:
    """Run every part and write `path`, and the page of Markdown beside it."""
    if path.suffix != ".json":
        raise InvalidRequestError(f"{path} is no name of a report: it must end with .json.")
    with tempfile.TemporaryDirectory(prefix="mlxinfer-report-") as folder:
        return run_parts(path, all_parts(extent_here(), checks, model, Path(folder)))


def all_parts(extent: Extent, checks: Part, model: str | None, folder: Path) -> dict[str, Part]:
    """The parts by name, in the order in which they run; random weights go into `folder`."""
    sources: dict[str, tuple[Callable[[], Path], Sequence[int]]] = {
        spec.name: (partial(random_checkpoint, folder / spec.name, spec), spec.contexts)
        for spec in extent.models
    }
    if model is not None:
        source = fetch(model)  # a wrong name or folder ends the command now
        if (problem := summarise(source).problem) is not None:
            raise problem
        sources = {model: (lambda: source, extent.models[0].contexts)}
    speeds = {
        f"speed of {name}": partial(speed_part, find, contexts, extent)
        for name, (find, contexts) in sources.items()
    }
    find, contexts = next(iter(sources.values()))
    return {
        "machine": checks,
        "kernels": lambda: kernel_report().as_dict(),
        "tokens": partial(tokens_part, extent.steps),
        "tokens, long": partial(long_tokens_part, find, extent.long, extent.steps),
        **speeds,
        "soak": partial(soak_part, find, contexts[-1], extent.soak_s),
    }


def run_parts(path: Path, parts: Mapping[str, Part]) -> Data:
    """Run parts, and write what is known before and after each."""
    outcomes: Data = {}
    command = describe_machine(shlex.join(["mlxinfer", *sys.argv[1:]]))
    report: Data = {"format": 1, "about": command, "running": None, "ok": False, "parts": outcomes}
    for number, (name, part) in enumerate(parts.items(), 1):
        write(path, report | {"running": name})
        note(f"[{number}/{len(parts)}] {name} ...")
        outcomes[name] = outcome(part)
        note(f"[{number}/{len(parts)}] {name}: {outcomes[name]['status']}")
    report["ok"] = all(entry["status"] == "ok" for entry in outcomes.values())
    write(path, report)
    return report


def outcome(part: Part) -> Data:
    """The entry of a part. Any exception is a finding about this machine."""
    begun_s = time.monotonic()
    try:
        data = part()
        entry = {"status": "ok" if data.get("ok", True) else "fail", "data": data}
    except Exception as error:  # a finding, see above
        text = f"{type(error).__name__}: {error}"
        entry = {"status": "error", "error": text, "traceback": traceback.format_exc()}
    return {"seconds": round(time.monotonic() - begun_s, 2)} | entry


def write(path: Path, report: Data) -> None:
    """Replace both files as wholes; the home folder is `~` in them, since they are published."""
    try:
        markdown = page(report)
    except Exception as error:  # the data is what counts
        markdown = f"This page could not be made: {type(error).__name__}: {error}\n"
    data = json.dumps(report, indent=1, default=str)
    for place, text in {path: data, path.with_suffix(".md"): markdown}.items():
        try:
            write_whole(place, text.replace(str(Path.home()) + os.sep, f"~{os.sep}").encode())
        except OSError as error:
            raise InvalidRequestError(f"{place} cannot be written: {error.strerror}.") from None


# -- the page of Markdown ---------------------------------------------------------------------

MAX_CELL = 400  # characters: an issue takes 65,536


def page(report: Data) -> str:
    """Every part: its facts, and a table for each list that it has."""
    parts = [{"part": name} | entry for name, entry in report["parts"].items()]
    running = report["running"]
    note_ = f"The report ended while this part was running: {running}." if running else ""
    overview = [{name: part.get(name, "") for name in OVERVIEW} for part in parts]
    tables = [_table("Parts", overview, note_)]
    for part in parts:
        lists = {key: value for key, value in part.get("data", {}).items() if _is_rows(value)}
        facts = {key: value for key, value in part.get("data", {}).items() if key not in lists}
        first, *further = lists.items() or [("", [])]
        tables.append(_table(f"{part['part']}: {first[0]}", first[1], _said(facts)))
        tables += [_table(f"{part['part']}: {key}", rows) for key, rows in further]
    text = markdown(Report("doctor", tables, {}, dict(report["about"])))
    return f"# A report of mlxinfer\n\n{text}\n"


OVERVIEW = ("part", "status", "seconds", "error")


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _table(title: str, rows: Sequence[Data], said: str = "") -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_said(row.get(key, ""), key) for key in columns] for row in rows]
    names = [column.removesuffix("_bytes").replace("_", " ") for column in columns]
    return Table(title.removesuffix(": "), names or ["none"], cells, said)


def _said(value: Any, name: str = "") -> str:
    """A fact in one line of at most MAX_CELL characters, in which `<float>` is no HTML."""
    if isinstance(value, dict):
        text = "; ".join(f"{key}: {_said(item, str(key))}" for key, item in value.items())
    elif isinstance(value, (int, float)) and name.endswith("_bytes"):
        text = human_bytes(value)
    else:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
    line = " ".join(text.split()).replace("<", "&lt;")
    return line if len(line) <= MAX_CELL else f"{line[:MAX_CELL]} ..."


# -- parts ------------------------------------------------------------------------------------


def machine_part(checks: Sequence[Data]) -> Data:
    """The doctor's checks, and what MLX and the system say of this machine."""
    return {
        "ok": all(check["status"] != "fail" for check in checks),
        "checks": list(checks),
        "device": dict(mx.device_info()),
        "command_buffer": command_buffer_limits(),
        "memory_bytes": total_memory_bytes(),
        "system": platform.platform(),
    }


class Way(NamedTuple):
    """How an answer is computed on kernels."""

    speculate: Literal["off", "auto"] = "off"  # auto: steps verify proposals
    page_size: int = 16


def tokens_part(steps: int) -> Data:
    """Greedy answers of the bundled model with kernels, beside those of plain MLX alone."""
    ways = {"kernels": Way(), "kernels and proposals": Way("auto")}
    return _same_tokens(
        "demo", lambda llm: {text: llm.tokenizer.encode(text) for text in PROMPTS}, ways, steps
    )


def long_tokens_part(find: Callable[[], Path], length: int, steps: int) -> Data:
    """The same after prompts of `length` random words, and with pages of 32 tokens."""

    def drawn(llm: LLM) -> dict[str, list[int]]:
        most = min(length, (llm.model_info.max_context or 0) - steps)
        ids = prompts(llm.tokenizer, most, 2, "long")
        return {f"{len(prompt)} random tokens, {i}": prompt for i, prompt in enumerate(ids)}

    ways = {"kernels": Way(), "kernels, pages of 32": Way(page_size=32)}
    return _same_tokens(find(), drawn, ways, steps)


def _same_tokens(
    source: str | Path,
    prompts_of: Callable[[LLM], dict[str, list[int]]],
    ways: Mapping[str, Way],
    steps: int,
) -> Data:
    """Where answers of several ways differ from those of plain MLX, and how long each took."""
    answers: dict[str, GreedyAnswers] = {}
    for name, way in ways.items():
        pages = variable(PAGES_VARIABLE, str(way.page_size))
        with pages, LLM(source, speculate=way.speculate) as llm:
            answers[name] = _greedy(llm, prompts_of(llm), steps)
            kernels = llm.stats()["kernels"]
    with plain_mlx(), LLM(source, speculate="off") as llm:
        prompts_ids = prompts_of(llm)
        answers["plain MLX"] = plain = _greedy(llm, prompts_ids, steps)
        differences = [
            {"way": name, "prompt": prompt, **difference}
            for name in ways
            for (prompt, ids), *tokens in zip(
                prompts_ids.items(), answers[name].tokens, plain.tokens, strict=True
            )
            if (difference := _first_difference(llm, ids, *tokens)) is not None
        ]
    seconds = {name: answer.seconds for name, answer in answers.items()}
    lengths = [len(ids) for ids in prompts_ids.values()]
    return {
        "steps": steps,
        "prompts": lengths,
        "kernels": kernels,
        "seconds": seconds,
        "differences": differences,
    }


def plain_mlx() -> AbstractContextManager[None]:
    """Models that are loaded meanwhile use no kernels."""
    return variable(KERNELS_VARIABLE, "off")


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _greedy(llm: LLM, prompts_ids: Mapping[str, list[int]], steps: int) -> GreedyAnswers:
    begun_s = time.perf_counter()
    results = llm.generate(
        list(prompts_ids.values()), max_tokens=steps, temperature=0, ignore_eos=True
    )
    return GreedyAnswers(
        [list(result.token_ids) for result in results], time.perf_counter() - begun_s
    )


def _first_difference(
    llm: LLM, prompt: Sequence[int], tokens: list[int], plain: list[int]
) -> Data | None:
    """Where an answer to `prompt` differs first, how close its two tokens are; None: nowhere."""
    pairs = zip(tokens, plain, strict=True)
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None
    ids = [*prompt, *plain[:place]]
    result = llm.generate(ids, max_tokens=1, temperature=0, ignore_eos=True, logprobs=5)
    assert result.logprobs is not None
    return {
        "step": place,
        "tokens": [tokens[place], plain[place]],
        "most_probable": [list(pair) for pair in result.logprobs[0].top],
    }


def speed_part(find: Callable[[], Path], contexts: Sequence[int], extent: Extent) -> Data:
    """Rates of a model beside the limits of the chip, and counters of each measurement.

    Proposals are off, since the limits are those of a step for each token.
    """
    folder = find()
    summary, begun_s = summarise(folder), time.perf_counter()
    with LLM(folder, prefix_cache=False, speculate="off") as llm:
        data: Data = {"load_seconds": time.perf_counter() - begun_s, "model": _facts(llm)}
        measure(partial(token_times, llm), llm.tokenizer, 64, 1, 4, 1)  # loads and compiles
        most = (llm.model_info.max_context or 0) - extent.tokens
        sizes = [(n, batch) for batch in BATCHES for n in contexts if n <= most]
        deadline_s = time.monotonic() + extent.speed_s
        cells = [_cell(llm, summary, *size, extent.tokens, deadline_s) for size in sizes]
        kernels = llm.stats()["kernels"]
    return data | {"kernels": kernels, "cells": cells}


def _facts(llm: LLM) -> Data:
    info = llm.model_info
    names = ("architecture", "num_layers", "quantization", "weights_bytes", "kv_bytes_per_token")
    return {name: getattr(info, name) for name in names}


def _cell(
    llm: LLM, summary: Summary, context: int, batch: int, tokens: int, deadline_s: float
) -> Data:
    size = {"context": context, "batch": batch}
    if time.monotonic() > deadline_s:
        return size | {"left_out": "the time was up"}
    if not has_room(llm, context, batch, tokens):
        return size | {"left_out": "the KV cache has no room"}
    note(f"  {context} x {batch}")
    before = llm.stats()
    cell = measure(partial(token_times, llm), llm.tokenizer, context, batch, tokens, 1)
    after = llm.stats()
    counters = {name: after[name] - before[name] for name in COUNTERS}
    return {**asdict(cell), "counters": counters, "limits": limits(summary, context, batch)}


def limits(summary: Summary, context: int, batch: int) -> Data:
    """Tokens a second that this chip allows at most, or why that is unknown.

    A step of a batch reads the weights once, and the KV cache of every request.
    """
    mac = this_mac()
    if mac is None or summary.config is None or summary.weights is None:
        return {"unknown": "this chip is not in the table of chips" if mac is None else "model"}
    weights = summary.weights
    rates = estimate(summary.config, weights.num_bytes, weights.work, mac, context * batch)
    return {
        "machine": mac.name,
        "prompt_tokens_per_s": rates["prefill_tokens_per_s"],
        "generation_tokens_per_s": [rate * batch for rate in rates["decode_tokens_per_s"]],
    }


def this_mac() -> Machine | None:
    chip = mx.device_info().get("device_name", "")
    try:
        return machine(f"{chip} {round(total_memory_bytes() / 2**30)}GB")
    except MlxinferError:
        return None


def soak_part(find: Callable[[], Path], longest: int, soak_s: float) -> Data:
    """MLX's memory while requests come and their contexts grow from 64 tokens to `longest`."""
    with LLM(find(), prefix_cache=False) as llm:
        longest = min(longest, (llm.model_info.max_context or 0) - 16)
        mx.reset_peak_memory()
        return asyncio.run(_soak(llm, longest, soak_s))


async def _soak(llm: LLM, longest: int, soak_s: float) -> Data:
    begun_s = time.monotonic()
    samples: list[Data] = []
    answered = [0] * SOAKING

    def seconds() -> float:
        return time.monotonic() - begun_s

    async def ask(client: int) -> None:
        for turn in count():
            if seconds() > soak_s:
                return
            length = min(64 << turn % 8, longest)
            [ids] = prompts(llm.tokenizer, length, 1, f"{client} {turn}")
            await llm.agenerate(ids, max_tokens=16, ignore_eos=True)
            answered[client] += 1

    async def watch() -> None:
        while seconds() < soak_s:
            await asyncio.sleep(soak_s / 20)
            sample = {"seconds": round(seconds(), 1), "requests": sum(answered)}
            samples.append(sample | {f"{name}_bytes": held() for name, held in MEMORY.items()})

    await asyncio.gather(watch(), *map(ask, range(SOAKING)))
    stats = llm.stats()
    return {"samples": samples, "counters": {name: stats[name] for name in COUNTERS}}


# -- random weights ---------------------------------------------------------------------------


def random_checkpoint(folder: Path, model: RandomModel) -> Path:
    """Write random weights in 4 bits, a file for each layer, unless they are there already.

    Everything else is that of the bundled model.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir()
    bundled = hub.resolve("demo", download=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundled / name).read_bytes())
    config = json.loads((bundled / "config.json").read_text())
    config |= model.sizes | {"max_position_embeddings": 32_768, "rope_theta": 1e6}
    config["tie_word_embeddings"] = bool(config["tie_word_embeddings"])
    for number in range(config["num_hidden_layers"]):
        arrays: dict[str, mx.array] = {}
        for name, shape in _layer_shapes(config).items():
            arrays |= _random(f"model.layers.{number}.{name}", shape)
        _save(folder / f"model-{number:03}.safetensors", arrays)
    table = (config["vocab_size"], config["hidden_size"])
    ends = _random("model.embed_tokens", table) | _random("model.norm", table[1:])
    ends |= {} if config["tie_word_embeddings"] else _random("lm_head", table)
    _save(folder / "model-ends.safetensors", ends)
    # The config comes last: where it is, everything is.
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _layer_shapes(config: Data) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _random(name: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """Ones for a vector; for a matrix random codes whose values have a mean of about zero."""
    if len(shape) == 1:
        return {f"{name}.weight": mx.ones(shape, dtype=mx.bfloat16)}
    rows, columns = shape
    scales = mx.full((rows, columns // GROUP), 0.22 / columns**0.5, dtype=mx.bfloat16)
    codes = mx.random.randint(0, 1 << 32, (rows, columns * BITS // 32), dtype=mx.uint32)
    return {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": -7.5 * scales}


def _save(path: Path, arrays: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})
