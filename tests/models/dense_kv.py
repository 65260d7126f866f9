"""The plainest possible KV cache: a list of keys and values per sequence, and masked softmax.

cache = DenseCache(model)
caches = cache.step([("a", 5), ("b", 1)])  # 5 tokens of a, then 1 of b
hidden = model(ids, Step(positions, caches))
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxinfer.cache_specs import (
    BlockSpec,
    CacheSpec,
    EntrySpec,
    KVSpec,
    LatentSpec,
    PooledSpec,
    StateSpec,
)
from mlxinfer.layers.ranks import AbsentMixer
from mlxinfer.layers.relative_attention import RelativeBias
from mlxinfer.layers.step import Step


class DenseLayerKV:
    """One layer's keys and values of every sequence, and the segments of the step."""

    heads = None  # layers prepare queries, keys and values themselves

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.past: dict[str, tuple[mx.array, mx.array]] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def attend(self, queries, keys, values, softmax, choice=None, rows=None):
        spec = self.spec
        num_tokens = sum(count for _, count in self.segments)
        assert keys.shape == (num_tokens, spec.num_kv_heads, spec.key_dim)
        assert values.shape == (num_tokens, spec.num_kv_heads, spec.value_dim)
        outputs, start = [], 0
        for name, count in self.segments:
            rows = slice(start, start + count)
            whole = queries[rows], keys[rows], values[rows]
            one = self._attend_one(name, *whole, softmax)
            if isinstance(choice, RelativeBias):
                one = self._with_bias(name, queries[rows], choice, rows, softmax.scale)
            elif choice is not None:
                one = self._over_chosen(name, queries[rows], choice[rows], softmax)
            outputs.append(one)
            start += count
        return mx.concatenate(outputs).flatten(1)

    def _with_bias(self, name, queries, bias, rows, scale):
        """Scores with a bias by distance, and a sink of each token and head; row by row."""
        keys, values = (np.array(part.astype(mx.float32)) for part in self.past[name])
        served, outputs, first = queries.shape[1] // keys.shape[1], [], len(keys) - len(queries)
        keys, values = (np.repeat(part, served, axis=1) for part in (keys, values))  # (S, H, D)
        profiles = np.array(bias.states[rows] @ bias.profiles)  # (n, H, E)
        for row, query in enumerate(np.array(queries)):
            stop = first + row + 1
            start = 0 if self.spec.window is None else max(0, stop - self.spec.window)
            scores = scale * np.einsum("hd,shd->hs", query, keys[start:stop])
            near = min(stop - start, profiles.shape[2])
            scores[:, stop - start - near :] += profiles[row, :, :near][:, ::-1]
            sink = np.array(bias.sinks)[rows][row][:, None]
            weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), sink))
            top = np.maximum(scores.max(-1, keepdims=True), sink)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
            outputs.append(np.einsum("hs,shd->hd", weights, values[start:stop]))
        return mx.array(np.stack(outputs))

    def _over_chosen(self, name, queries, seen, softmax):
        """`seen`: of each query, the tokens that each of some groups of heads sees.

        Or the entries (E, D) that it sees beside its window.
        """
        collected = []
        if self.spec.window is not None:
            vectors, stop = self.past[name][0], len(self.past[name][0])
            for place, (query, entries) in enumerate(zip(queries, seen, strict=True)):
                last = stop - len(queries) + place + 1
                near = vectors[max(last - self.spec.window, 0) : last]
                both = mx.concatenate([entries[:, None], near])
                collected.append(masked_attention(query[None], both, both, **softmax._asdict()))
            return mx.concatenate(collected)
        for query, groups in zip(queries, seen, strict=True):
            parts = [mx.split(part, len(groups), axis=1) for part in self.past[name]]
            heads = [
                masked_attention(
                    row_queries[None],
                    *(part[i][mx.array(tokens)] for part in parts),
                    **softmax._asdict(),
                )
                for i, (row_queries, tokens) in enumerate(
                    zip(mx.split(query, len(groups)), groups, strict=True)
                )
            ]
            collected.append(mx.concatenate(heads, axis=1))
        return mx.concatenate(collected)

    def attend_again(self, queries, softmax, rows=None):
        outputs, start = [], 0
        for name, count in self.segments:
            rows = slice(start, start + count)
            outputs.append(self._over_past(name, queries[rows], softmax))
            start += count
        return mx.concatenate(outputs).flatten(1)

    def _attend_one(self, name, q, k, v, softmax):
        if name in self.past:
            past_k, past_v = self.past[name]
            k, v = mx.concatenate([past_k, k]), mx.concatenate([past_v, v])
        self.past[name] = (k, v)
        return self._over_past(name, q, softmax)

    def _over_past(self, name, q, softmax):
        return masked_attention(
            q,
            *self.past[name],
            window=self.spec.window,
            kept=self.spec.sinks,
            chunked=self.spec.chunked,
            **softmax._asdict(),
        )


class DenseLatentCache:
    """One layer's latent vectors of every sequence; segments of up to `max_short` are absorbed."""

    def __init__(self, spec: LatentSpec, max_short: int = 8) -> None:
        self.spec = spec
        self.max_short = max_short
        self.past: dict[str, mx.array] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def attend(self, q_nope, q_rope, latent, k_rope, *, projection, scale, choice=None):
        """`choice`: positions that each row sees, under one head; None: all before it."""
        num_tokens = sum(count for _, count in self.segments)
        assert latent.shape == (num_tokens, self.spec.latent_dim)
        assert k_rope.shape == (num_tokens, self.spec.rope_dim)
        new = mx.concatenate([latent, k_rope], axis=-1)
        outputs, start = [], 0
        for name, count in self.segments:
            rows = slice(start, start + count)
            past = [self.past[name]] if name in self.past else []
            self.past[name] = mx.concatenate([*past, new[rows]])
            attend = self._absorbed if count <= self.max_short else self._expanded
            if choice is None:
                seen = self.past[name]
                outputs.append(attend(q_nope[rows], q_rope[rows], seen, projection, scale))
            for row in range(start, start + count) if choice is not None else ():
                row_slice, seen = slice(row, row + 1), self.past[name][mx.array(choice[row][0])]
                outputs.append(
                    attend(q_nope[row_slice], q_rope[row_slice], seen, projection, scale)
                )
            start += count
        return mx.concatenate(outputs)

    def _absorbed(self, q_nope, q_rope, past, projection, scale):
        queries = mx.concatenate([projection.absorb(q_nope), q_rope], axis=-1)
        values = past[:, None, : self.spec.latent_dim]
        seen = {"window": self.spec.window, "kept": self.spec.sinks}
        attended = masked_attention(queries, past[:, None], values, scale=scale, **seen)
        return projection.value(attended)

    def _expanded(self, q_nope, q_rope, past, projection, scale):
        latent, k_rope = past[:, : self.spec.latent_dim], past[:, None, self.spec.latent_dim :]
        k_nope, values = projection.expand(latent)
        k_rope = mx.broadcast_to(k_rope, (*k_nope.shape[:2], self.spec.rope_dim))
        keys = mx.concatenate([k_nope, k_rope], axis=-1)
        queries = mx.concatenate([q_nope, q_rope], axis=-1)
        seen = {"window": self.spec.window, "kept": self.spec.sinks}
        return masked_attention(queries, keys, values, scale=scale, **seen)


class DenseRankedCache(DenseLatentCache):
    """The same of a layer with an indexer: a token sees the tokens of the highest ranks."""

    def __init__(self, spec: LatentSpec, max_short: int = 8) -> None:
        super().__init__(spec, max_short)
        self.index: dict[str, np.ndarray] = {}

    def attend(self, q_nope, q_rope, latent, k_rope, *, projection, scale, index):
        queries, weights, keys = (np.array(part) for part in index[:3])
        chosen, choosing = index[3], self.spec.index_dim != 0
        assert not choosing or keys.shape == (len(latent), self.spec.index_dim)
        new, outputs, start = mx.concatenate([latent, k_rope], axis=-1), [], 0
        for name, count in self.segments:
            rows = slice(start, start + count)
            known = [self.index[name]] if name in self.index else []
            self.index[name] = np.concatenate([*known, keys[rows]])
            past = [self.past[name]] if name in self.past else []
            self.past[name] = mx.concatenate([*past, new[rows]])
            for row in range(start, start + count):
                stop = len(self.index[name]) - (rows.stop - row) + 1
                if choosing:
                    scores = np.maximum(queries[row] @ self.index[name][:stop].T, 0)  # (Hi, stop)
                    order = np.argsort(-(weights[row] @ scores), kind="stable")
                    chosen[row] = mx.array(np.sort(order[: self.spec.num_ranked]))
                seen = self.past[name][chosen[row]]
                one = slice(row, row + 1)
                outputs.append(self._expanded(q_nope[one], q_rope[one], seen, projection, scale))
            start += count
        return mx.concatenate(outputs)


class DensePooledCache:
    """What all tokens of a sequence bring to an index, and the tokens that each of a step sees."""

    def __init__(self, spec: PooledSpec, pool) -> None:
        self.spec = spec
        self.pool = pool
        self.past: dict[str, tuple[mx.array, mx.array]] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def choose(self, queries, weights, raw, positions):
        assert raw.shape == (sum(count for _, count in self.segments), self.spec.raw_dim)
        seen, start, ratio = [], 0, self.spec.ratio
        for name, count in self.segments:
            rows = slice(start, start + count)
            new = raw[rows], positions[..., rows]
            before = self.past.get(name, (raw[:0], positions[..., :0]))
            whole = [
                mx.concatenate(pair, axis) for *pair, axis in zip(before, new, (0, -1), strict=True)
            ]
            self.past[name] = tuple(whole)
            num_blocks = len(whole[0]) // ratio
            keys = np.zeros((0, self.spec.dim))
            if num_blocks:
                blocks = mx.unflatten(whole[0][: num_blocks * ratio], 0, (-1, ratio))
                firsts = whole[1][..., : num_blocks * ratio : ratio]
                keys = np.array(self.pool(blocks, firsts))
            for row in range(start, start + count):
                stop = len(whole[0]) - (rows.stop - row) + 1
                scores = np.maximum(np.array(queries[row]) @ keys[: stop // ratio].T, 0)
                ranks = -(np.array(weights[row]) @ scores)
                best = np.sort(np.argsort(ranks, kind="stable")[: self.spec.num_ranked])
                tokens = [block * ratio + i for block in best.tolist() for i in range(ratio)]
                seen.append([[*tokens, *range(stop - stop % ratio, stop)]])
            start += count
        return seen


class DenseEntryCache:
    """What all tokens of a sequence bring to entries, and the entries that each of a step sees."""

    def __init__(self, spec: EntrySpec, pool) -> None:
        self.spec = spec
        self.pool = pool
        self.past: dict[str, mx.array] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def choose(self, queries, weights, raw, positions):
        assert raw.shape == (sum(count for _, count in self.segments), self.spec.raw_dim)
        seen, start = [], 0
        for name, count in self.segments:
            before = self.past.get(name, raw[:0])
            self.past[name] = whole = mx.concatenate([before, raw[start : start + count]])
            keys, entries = self._blocks(whole)
            for row in range(start, start + count):
                num = (len(before) + row - start + 1) // self.spec.ratio
                if queries is None or not num:
                    seen.append(entries[:num])
                    continue
                scores = np.maximum(np.array(queries[row]) @ keys[:num].T, 0)
                order = np.argsort(-(np.array(weights[row]) @ scores), kind="stable")
                seen.append(entries[mx.array(np.sort(order[: self.spec.num_ranked]))])
            start += count
        return seen

    def _blocks(self, whole):
        """Index keys and entries, one block after the other by itself."""
        spec, blocks = self.spec, []
        for stop in range(spec.ratio, len(whole) + 1, spec.ratio):
            first = stop - spec.ratio
            block, earlier = whole[None, first:stop], None
            if spec.carried:
                earlier = whole[None, max(first - spec.ratio, 0) : first or stop][
                    ..., : spec.carried
                ]
            blocks.append(self.pool(block, earlier, mx.array([first])))
        if not blocks:
            return np.zeros((0, spec.index_dim)), mx.zeros((0, spec.dim))
        parts = [mx.concatenate(part) for part in zip(*blocks, strict=True)]
        return np.array(parts[0]), parts[-1]


class DenseBlockCache:
    """The index keys of every sequence, and the tokens that each head of the index chooses."""

    def __init__(self, spec: BlockSpec) -> None:
        self.spec = spec
        self.past: dict[str, np.ndarray] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def choose(self, queries, keys, served):
        queries, keys, seen, start = np.array(queries), np.array(keys), [], 0
        assert keys.shape == (sum(count for _, count in self.segments), self.spec.dim)
        for name, count in self.segments:
            before = self.past.get(name, keys[:0])
            whole = self.past[name] = np.concatenate([before, keys[start : start + count]])
            for row in range(start, start + count):
                stop = len(before) + row - start + 1
                seen.append([self._seen(one @ whole[:stop].T) for one in queries[row]])
            start += count
        return seen

    def _seen(self, scores: np.ndarray) -> list[int]:
        size, stop = self.spec.block, len(scores)
        ranks = np.array([scores[i : i + size].max() for i in range(0, stop, size)])
        ranks[max(len(ranks) - self.spec.num_near, 0) :] = np.inf
        best = np.sort(np.argsort(-ranks, kind="stable")[: self.spec.num_ranked])
        tokens = [block * size + i for block in best.tolist() for i in range(size)]
        return [token for token in tokens if token < stop]


def no_kernel():
    """Where states lie, which only kernels ask."""
    raise AssertionError("no kernel is used here")


class DenseStateCache:
    """One recurrent layer's states of every sequence; each goes through the recurrence alone."""

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec
        self.past: dict[str, list[mx.array]] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def recur(self, rows, advance):
        outputs, start = [], 0
        zeros = [mx.zeros((1, *shape), getattr(mx, dtype)) for shape, dtype in self.spec.shapes]
        for name, count in self.segments:
            inputs = [x[start : start + count][None] for x in rows]
            before = self.past.get(name, zeros)
            y, states = advance(inputs, lambda before=before: (before, None), no_kernel)
            replayed = advance(
                inputs, lambda before=before, n=count: (before, mx.array([n])), no_kernel
            )[1]
            for state, again, zero in zip(states, replayed, zeros, strict=True):
                assert state.shape == zero.shape
                assert mx.allclose(state, again, atol=1e-5), "replayed to the end"
            self.past[name] = list(states)
            outputs.append(y[0])
            start += count
        return mx.concatenate(outputs)


def dense_cache(mixer, spec: CacheSpec):
    """Of the kind that a layer needs."""
    if isinstance(spec, PooledSpec):
        return DensePooledCache(spec, mixer.pool)
    if isinstance(spec, EntrySpec):
        return DenseEntryCache(spec, mixer.pool)
    if isinstance(spec, BlockSpec):
        return DenseBlockCache(spec)
    if isinstance(spec, StateSpec):
        return DenseStateCache(spec)
    if not isinstance(spec, LatentSpec):
        return DenseLayerKV(spec)
    return DenseRankedCache(spec) if spec.num_ranked else DenseLatentCache(spec)


class DenseCache:
    """A dense cache for each layer of a model."""

    def __init__(self, model) -> None:
        self.layers = {
            mixer: dense_cache(mixer, spec)
            for mixer, spec in zip(model.mixers, model.cache_specs, strict=True)
            if not isinstance(mixer, AbsentMixer)  # of another pipeline stage
        }
        self.lengths: dict[str, int] = {}
        self.rope_variants: dict[str, int] = {}  # of sequences where it is not 0

    def step(self, segments: Sequence[tuple[str, int]]) -> dict:
        """The caches of mixers for a step of these (sequence, number of tokens), in this order."""
        for layer in self.layers.values():
            layer.segments = segments
        return self.layers

    def run(self, model, chunks: Sequence[tuple[str, Sequence[int]]]) -> mx.array:
        """Logits (T, vocab_size) of a step over (sequence, its next token ids) pairs."""
        positions: list[int] = []
        for name, ids in chunks:
            start = self.lengths.get(name, 0)
            positions += range(start, start + len(ids))
            self.lengths[name] = start + len(ids)
        flat = [token for _, ids in chunks for token in ids]
        variants = [self.rope_variants.get(name, 0) for name, ids in chunks for _ in ids]
        step = Step(
            mx.array(positions, mx.int32),
            self.step([(name, len(ids)) for name, ids in chunks]),
            rope_variants=np.array(variants, np.int32) if any(variants) else None,
        )
        return model.logits(model(mx.array(flat, mx.int32), step))


def logits(model, ids: Sequence[int] = range(3, 43)) -> np.ndarray:
    """(T, vocab) float32, of a sequence by itself."""
    return np.array(DenseCache(model).run(model, [("a", ids)]).astype(mx.float32))


def masked_attention(
    q, k, v, *, scale, window=None, kept=0, chunked=False, sinks=None, soft_cap=None
):
    """q (L, H, D): the last L tokens of k (S, Hkv, D) and v (S, Hkv, Dv) -> (L, H, Dv).

    With a window the first `kept` positions stay visible; `sinks` are learned logits. `chunked`:
    the context is cut into chunks of `window` tokens, which do not see each other.
    """
    length, heads, _ = q.shape
    total, kv_heads, _ = k.shape
    k = mx.repeat(k, heads // kv_heads, axis=1).transpose(1, 2, 0)  # (H, D, S)
    v = mx.repeat(v, heads // kv_heads, axis=1).transpose(1, 0, 2)  # (H, S, Dv)
    scores = scale * (q.transpose(1, 0, 2) @ k)  # (H, L, S)
    if soft_cap is not None:
        scores = soft_cap * mx.tanh(scores / soft_cap)
    at = mx.arange(total - length, total)[:, None]
    of = mx.arange(total)[None]
    seen = of <= at
    if chunked:
        seen = seen & (of // window == at // window)
    elif window is not None:
        seen = seen & ((of > at - window) | (of < kept))
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks[:, None, None], (heads, length, 1)).astype(scores.dtype)
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :total]
    return (weights @ v).transpose(1, 0, 2)
