"""mlx-lm as its own server drives it: BatchGenerator and LRUPromptCache, without HTTP.

The order of things is that of `mlx_lm.server`: everything that has arrived is looked up in the
prompt cache and inserted; caches are stored where a segment ends and where an answer ends. Its
server also spends half a second on a batch before it looks for arrivals; that is left out.
"""

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .peer import _module
from .served import Answered, Ask, Clock, Served, Token

MODEL_KEY = "model"


class PeerServer:
    """mlx-lm with the defaults of its server.

    Args:
        model: from `load_peer_model`.
        max_batch: requests that decode at once.
        max_entries: of its prompt cache.
    """

    def __init__(self, model: Any, *, max_batch: int = 32, max_entries: int = 10) -> None:
        self.prompt_tokens = 0
        self.prompt_tokens_computed = 0
        self.generator = _module("mlx_lm.generate").BatchGenerator(
            model, completion_batch_size=max_batch
        )
        self._make_sampler = _module("mlx_lm.sample_utils").make_sampler
        self._stored = _module("mlx_lm.models.cache").LRUPromptCache(max_entries)
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
        """It has none."""
        return 0

    def submit(self, ask: Ask) -> None:
        """Take what the prompt cache has, and insert the rest."""
        prompt = ask.prompt_ids
        cache, rest = self._stored.fetch_nearest_cache(MODEL_KEY, prompt)
        num_cached = len(prompt) - len(rest)
        self.prompt_tokens += len(prompt)
        self.prompt_tokens_computed += len(rest)
        segments = _without(ask.segments, num_cached)
        (uid,) = self.generator.insert_segments(
            [[list(ids) for _, ids in segments]],
            max_tokens=[ask.max_tokens],
            caches=[cache],
            all_tokens=[prompt[:num_cached]],
            samplers=[self._make_sampler(temp=0.0)],
        )
        self._names[uid] = ask.name
        self._types[uid] = [kind for kind, _ in segments][::-1]

    def step(self) -> list[Token]:
        """What its server does in a loop."""
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
    """What mlx-lm's server does with asks where `--kv-bits` is given: one after the other."""
    generate_step = _module("mlx_lm.generate").generate_step
    make_cache = _module("mlx_lm.models.cache").make_prompt_cache
    answers: dict[str, Answered] = {}
    started, peak, prompt_tokens = clock(), 0, 0
    for ask in asks:
        answer = answers[ask.name] = Answered()
        prompt_ids, cache = ask.prompt_ids, make_cache(model)
        prompt_tokens += len(prompt_ids)
        for token_id, _ in generate_step(
            mx.array(prompt_ids),
            model,
            max_tokens=ask.max_tokens,
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
