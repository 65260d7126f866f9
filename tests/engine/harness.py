"""Drives the engine's loop turn by turn, without threads: a program of arrivals is exact."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from cache.prefix_invariants import check
from engine.recurrent import hybrid_model
from models.bonsai import pack
from models.puzzle import puzzle
from models.tiny import quantized, tiny_checkpoint, tiny_config, write
from models.zoo_table import small_model

from mlxinfer.config import DiskOptions, EngineConfig, KVOptions
from mlxinfer.core import FinishReason, Grammar, Request, SamplingParams, TokenEvent, TokenLogprobs
from mlxinfer.engine.followers import NO_FOLLOWERS, Followers
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.engine.loop import Loop
from mlxinfer.engine.proposals import Proposer
from mlxinfer.images import PlacedPicture
from mlxinfer.models import load
from mlxinfer.models.adapters.loaded import read_adapter
from mlxinfer.models.decoder import Model

PAGE = 16
HYBRIDS = {  # places of recurrent layers among those of attention
    "hybrid qwen3-v4": (0, 2),
    "hybrid gemma3_text-v4": (1, 2),
    "hybrid deepseek_v3-v4": (1,),
    "recurrent qwen3-v4": (0, 1, 2),
}

MROPE = {  # cases with M-RoPE: of which other case, and the sections of their ropes
    "mrope qwen3-v5": ("qwen3-v5", {"mrope_section": [5, 4, 3]}),
    "mrope mistral-v5": ("mistral-v5", {"mrope_section": [4, 4, 4], "mrope_interleaved": True}),
}
QUANTIZED = {"group_size": 32, "bits": 4}


@cache
def tiny_model(case: str, *, quantized: bool = False) -> Model:
    """A tiny random model, loaded once; a quantised one gives the same bits in any batch."""
    how = QUANTIZED if quantized else None
    return load(tiny_checkpoint(Path(mkdtemp()), case, quantize=how))


@cache
def mrope_model(case: str) -> Model:
    """A tiny quantised model that turns by three positions."""
    base, sections = MROPE[case]
    changes = {"rope_parameters": {**tiny_config(base)["rope_parameters"], **sections}}
    changes |= {"attention_bias": False}  # 4-bit keys are refused with biases before a norm
    return load(tiny_checkpoint(Path(mkdtemp()), base, quantize=QUANTIZED, **changes))


def wide_model(
    case: str = "qwen3-v4", *, layers: int = 2, bits: int | None = None, **sizes: Any
) -> Model:
    """A tiny model with a head dim that the kernels have; its weights in so many bits."""
    sizes = {"head_dim": 64, "num_hidden_layers": layers, "max_position_embeddings": 256} | sizes
    if (types := tiny_config(case).get("layer_types")) is not None:
        sizes["layer_types"] = types[-layers:]
    form = None if bits is None else {"group_size": 32, "bits": bits}
    return load(tiny_checkpoint(Path(mkdtemp()), case, quantize=form, **sizes))


@cache
def packed_model() -> Model:
    """A tiny pack of Bonsai 2, whose 2-bit matrices read rotated inputs."""
    config, packed, _ = pack()
    return load(write(Path(mkdtemp()), config, packed))


@cache
def puzzle_model() -> Model:
    """A tiny quantised model whose layers of experts have sizes of their own."""
    config, tensors = puzzle()
    config["quantization"] = QUANTIZED
    return load(write(Path(mkdtemp()), config, quantized(tensors, QUANTIZED)))


def config(**changes: object) -> EngineConfig:
    """Small sizes; every one can be changed."""
    defaults: dict[str, object] = {
        "page_size": PAGE, "max_batch": 8, "prefill_chunk": 64, "max_context": 4096,
        "kv_budget_bytes": 1 << 26,
    }  # fmt: skip
    return EngineConfig(**{**defaults, **changes})  # type: ignore[arg-type]


def disk_at(folder: Path, weights: str = "tiny") -> DiskOptions:
    """What keeps the pages of these weights under a folder."""
    return DiskOptions(folder=folder, max_bytes=1 << 26, identity=lambda timeout_s: weights)


@dataclass
class Outcome:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    first_token_turn: int | None = None
    cached_tokens: int = 0
    turns: list[int] = field(default_factory=list)  # in which its tokens came


class Harness:
    """A loop and what it said.

    Args:
        launch_ahead: as the loop does by itself; False: each step is read before the next one.
    """

    def __init__(
        self,
        model: Model,
        *,
        kernels: Chooser = choose_none,
        proposer: Proposer | None = None,
        adapters: Mapping[str, Path] | None = None,
        followers: Followers = NO_FOLLOWERS,
        launch_ahead: bool = True,
        **changes: object,
    ) -> None:
        self._launch_ahead = launch_ahead
        self._kv = {"kv": changes.get("kv"), "adapters": adapters}
        self._asked: dict[str, dict[str, Any]] = {}  # how each request is asked for, see `alone`
        self.outcomes: dict[str, Outcome] = {}
        self.turns = 0
        self.loop = Loop(
            model,
            config(**changes),
            self._take,
            kernels=kernels,
            proposer=proposer,
            followers=followers,
        )
        for name, folder in (adapters or {}).items():
            for _ in self.loop.adapters.load(name, read_adapter(folder)):
                pass

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._note(event)

    def _note(self, event: TokenEvent) -> None:
        outcome = self.outcomes[event.request_id]
        assert outcome.reason is None, "an event after the end"
        if event.token_id is not None:
            outcome.token_ids.append(event.token_id)
            outcome.turns.append(self.turns)
        outcome.cached_tokens = max(outcome.cached_tokens, event.cached_tokens)
        if event.logprobs is not None:
            outcome.logprobs.append(event.logprobs)
        if event.prompt_logits is not None:
            outcome.logits.append(event.prompt_logits)  # type: ignore[arg-type]
        outcome.reason, outcome.error = event.finish_reason, event.error

    def add(
        self,
        name: str,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        prompt_logits: bool = False,
        grammar: Grammar | None = None,
        adapter: str | None = None,
        pictures: tuple[PlacedPicture, ...] = (),
        **others: Any,
    ) -> None:
        request = Request(name, prompt_ids, params or SamplingParams(), stop_ids, prompt_logits)
        request = replace(request, grammar=grammar, adapter=adapter, pictures=pictures, **others)
        self._asked[name] = {
            "prompt_ids": prompt_ids, "params": request.params, "stop_ids": stop_ids,
            "grammar": grammar and grammar.fork(), "adapter": adapter, "pictures": pictures,
        }  # fmt: skip
        self.outcomes[name] = Outcome()
        self.loop.add(request, self.loop.limits.check(request))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()
            if not self._launch_ahead:
                self.loop._read(0)
            self.turns += 1

    def drain(self, max_turns: int = 5000) -> dict[str, Outcome]:
        """Run until nothing is left, and see that nothing is held."""
        for _ in range(max_turns):
            if self.loop.idle:
                break
            self.turn()
        assert self.loop.idle, "the queue did not drain"
        self.check_pages()
        return self.outcomes

    def check(self, *names: str, model: Model | None = None) -> dict[str, Outcome]:
        """Drain; each request, or each that is named, has the tokens that it gets alone.

        Args:
            model: answers it alone; None: the one of this loop.
        """
        outcomes = self.drain()
        for name in names or outcomes:
            plain = alone(model or self.loop.model, **self._asked[name], **self._kv)
            assert outcomes[name].token_ids == plain.token_ids, name
        return outcomes

    def run(self, name: str, *asked: Any, **more: Any) -> Outcome:
        """Add a request, and run until nothing is left."""
        self.add(name, *asked, **more)
        return self.drain()[name]

    def logits(self, ids: list[int], **more: Any) -> np.ndarray:
        """(T, vocab) of a prompt."""
        asked = SamplingParams(max_tokens=1)
        outcome = self.run("it", ids, asked, prompt_logits=True, **more)
        assert outcome.error is None
        return np.concatenate(outcome.logits)

    def check_pages(self) -> None:
        """When nothing runs, only the prefix cache has pages, all of them free to go."""
        prefix = self.loop.scheduler.kv_manager.prefix
        check(prefix)
        for g, group in enumerate(self.loop.cache.groups):
            held = group.allocator.num_held
            assert held == len(prefix.by_id[g]) == prefix.num_evictable(g)
        assert not self.loop.features.wanted
        assert not self.loop.features.stats()["in_use"]


def prompt(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    """Random token ids."""
    return np.random.default_rng((length, seed)).integers(3, vocab, length).tolist()  # type: ignore[no-any-return]


_kept: dict[tuple[object, ...], tuple[Model, Outcome]] = {}


def alone(
    model: Model,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    stop_ids: frozenset[int] = frozenset(),
    kv: KVOptions | None = None,
    grammar: Grammar | None = None,
    pictures: tuple[PlacedPicture, ...] = (),
    adapter: str | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Outcome:
    """One request by itself, nothing launched ahead, its prompt in one step: the plain run.

    It is deterministic, so that its outcome is kept for the next test that asks for it.
    """
    key = (id(model), tuple(prompt_ids), repr(params), stop_ids, repr(kv), repr(pictures), adapter)
    if grammar is None and key in _kept:
        return _kept[key][1]
    plain = {"launch_ahead": False, "prefill_chunk": 512, "max_batch": 1, "num_pages": 100}
    harness = Harness(model, **plain, kv=kv or KVOptions(), adapters=adapters if adapter else None)
    asked: dict[str, Any] = {"stop_ids": stop_ids, "pictures": pictures, "adapter": adapter}
    outcome = harness.run("alone", prompt_ids, params, grammar=grammar, **asked)
    assert outcome.error is None or grammar is not None, outcome.error
    if grammar is None:
        _kept[key] = model, outcome  # the model stays, so that its id is no other's
    return outcome


@cache
def zoo_model(name: str) -> Any:
    """A small model of one of mlx-lm's definitions."""
    return small_model(name, quantized=True)


def model_of(case: str) -> Model:
    """A tiny quantised model; a hybrid has recurrent layers instead of some of its own."""
    if case.startswith("zoo "):
        return zoo_model(case.split()[1])
    if case in ("bonsai 2", "puzzle"):
        return packed_model() if case == "bonsai 2" else puzzle_model()
    if case in MROPE:
        return mrope_model(case)
    if case in HYBRIDS:
        return hybrid_model(case.split()[1], HYBRIDS[case])
    return tiny_model(case, quantized=True)
