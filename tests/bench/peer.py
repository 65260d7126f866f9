"""mlx-lm under the same measurements: imported on use, driven as its own server drives it.

`PeerEngine` keeps the order of things of `mlx_lm.server`: everything that has arrived is looked up
in the prompt cache and inserted; caches are stored where a segment ends and where an answer ends.
That server also spends half a second on a batch before it looks for arrivals, which is left out.
"""

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxinfer.bench.peer import peer_module
from tests.bench.engines import FORWARD, Answered, Ask, Clock, Meter, Served, Token, Work


def peer_caches(model: Any, bits: int | None, count: int = 1) -> list[Any]:
    """A KV cache for each layer of mlx-lm's model, quantised from the first token on or plain.

    That of `mlx_lm.generate` for one sequence, that of its batches for more; its batches are never
    quantised, so that many equal prompts share one of the former.
    """
    caches = peer_module("mlx_lm.models.cache")
    if bits is not None:
        return [caches.QuantizedKVCache(group_size=64, bits=bits) for _ in model.layers]
    if count > 1:
        return [caches.BatchKVCache([0] * count) for _ in model.layers]
    return list(caches.make_prompt_cache(model))


class MeteredPeerModel:
    """mlx-lm's model, with its calls, rows and time counted."""

    def __init__(self, model: Any, meter: Meter) -> None:
        self.layers = model.layers
        self.work = Work()
        self.storing = False
        self._logits: mx.array | None = None
        self._forward = meter.timed(FORWARD, model)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        """inputs (B, L) -> logits (B, L, vocab)."""
        self.work = Work(self.work.passes + 1, self.work.rows + inputs.size)
        if self._logits is None or self._logits.shape[:2] != inputs.shape:
            logits = self._forward(inputs, cache=cache)
            if not self.storing:
                return logits
            mx.eval(logits)
            self._logits = logits
        return self._logits


MODEL_KEY = "model"


class PeerEngine:
    """mlx-lm with the defaults of its server.

    As there, every request brings its own sampler. A prefill is done when `step` returns.

    Args:
        model: from `load_peer_model`.
        max_batch: requests that decode at once.
        max_entries: of its prompt cache.
    """

    def __init__(self, model: Any, *, max_batch: int = 32, max_entries: int = 10) -> None:
        self.meter = Meter()
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self._model = MeteredPeerModel(model, self.meter)
        self._sampling = peer_module("mlx_lm.sample_utils")
        self._stored = peer_module("mlx_lm.models.cache").LRUPromptCache(max_entries)
        self.generator = peer_module("mlx_lm.generate").BatchGenerator(
            self._model, completion_batch_size=max_batch
        )
        self._names: dict[int, str] = {}
        self._types: dict[int, list[str]] = {}  # segments to come, the next one last

    @property
    def kv_bytes(self) -> int:
        """Of its batches and of its prompt cache, as mlx-lm counts them."""
        return int(self.generator.prompt_cache_nbytes + self._stored.nbytes)

    @property
    def running_bytes(self) -> int:
        """Of its batches alone."""
        return int(self.generator.prompt_cache_nbytes)

    @property
    def tail_bytes(self) -> int:
        """mlx-lm has no tails."""
        return 0

    @property
    def done(self) -> Work:
        """All work: a step returns when its prefill is done."""
        return self._model.work

    def store_model(self) -> None:
        """Compute once more, then no more."""
        self._model.storing = True

    def submit(self, ask: Ask) -> None:
        """Take what the prompt cache has, and insert the rest."""
        prompt, params = ask.prompt_ids, ask.params
        cache, rest = self._stored.fetch_nearest_cache(MODEL_KEY, prompt)
        num_cached = len(prompt) - len(rest)
        self.prompt_tokens += len(prompt)
        self.prompt_tokens_computed += len(rest)
        segments = _without(ask.segments, num_cached)
        sampler = self._sampling.make_sampler(
            temp=params.temperature,
            top_p=params.top_p if params.top_p < 1 else 0.0,
            min_p=params.min_p,
            top_k=params.top_k,
        )
        penalty = params.repetition_penalty
        processors = self._sampling.make_logits_processors(
            repetition_penalty=None if penalty == 1 else penalty
        )
        (uid,) = self.generator.insert_segments(
            [[list(ids) for _, ids in segments]],
            max_tokens=[params.max_tokens or 1 << 30],
            caches=[cache],
            all_tokens=[prompt[:num_cached]],
            samplers=[sampler],
            logits_processors=[processors],
        )
        self._names[uid] = ask.name
        self._types[uid] = [kind for kind, _ in segments][::-1]

    def step(self) -> list[Token]:
        """Take one turn of its server's loop."""
        prompts, generated = self.generator.next()
        ended = [
            r.uid
            for r in prompts
            if r.end_of_segment and not r.end_of_prompt and self._types[r.uid]
        ]
        for uid, (cache, ids) in self.generator.extract_cache(ended).items():
            kind = self._types[uid].pop()
            self._stored.insert_cache(MODEL_KEY, ids[:], cache, cache_type=kind)
        for r in generated:
            if r.finish_reason is not None:
                self._stored.insert_cache(MODEL_KEY, r.all_tokens[:], r.prompt_cache)
        return [Token(self._names[r.uid], r.token, r.finish_reason is not None) for r in generated]


def serve_one_by_one(
    model: Any,
    asks: Sequence[Ask],
    clock: Clock = time.perf_counter,
    *,
    kv_bits: int | None = 8,
    prefill_step: int = 2048,
) -> Served:
    """Answer asks as mlx-lm's server does where `--kv-bits` is given: one after the other."""
    generate_step = peer_module("mlx_lm.generate").generate_step
    make_cache = peer_module("mlx_lm.models.cache").make_prompt_cache
    answers: dict[str, Answered] = {}
    started, peak, prompt_tokens = clock(), 0, 0
    for ask in asks:
        answer = answers[ask.name] = Answered()
        prompt_ids, cache = ask.prompt_ids, make_cache(model)
        prompt_tokens += len(prompt_ids)
        for token_id, _ in generate_step(
            mx.array(prompt_ids),
            model,
            max_tokens=ask.params.max_tokens,
            prompt_cache=cache,
            kv_bits=kv_bits,
            prefill_step_size=prefill_step,
        ):
            answer.first_s = answer.first_s or clock() - started
            answer.token_ids.append(token_id)
        peak = max(peak, sum(layer.nbytes for layer in cache))
    return Served(answers, prompt_tokens, prompt_tokens, peak, clock() - started)


def _without(segments: list[tuple[str, list[int]]], count: int) -> list[tuple[str, list[int]]]:
    """The segments without their first `count` tokens; whole ones are left out."""
    left = list(segments)
    while count and left:
        kind, ids = left[0]
        if count < len(ids):
            left[0] = kind, ids[count:]
            break
        count -= len(ids)
        del left[0]
    return left
