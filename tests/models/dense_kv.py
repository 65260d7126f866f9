"""The plainest possible KV cache: a list of keys and values per sequence, and masked softmax.

cache = DenseCache(model)
caches = cache.step([("a", 5), ("b", 1)])  # 5 tokens of a, then 1 of b
hidden = model(ids, Step(positions, caches))
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer.cache_specs import (
    BlockSpec,
    CacheSpec,
    CompressedSpec,
    KVSpec,
    LatentSpec,
    PooledSpec,
    StateSpec,
)
from mlxinfer.layers.ranks import AbsentMixer
from mlxinfer.layers.relative_attention import RelativeBias
from mlxinfer.layers.step import Step


class DenseLayer:
    """What the tokens of every sequence brought to a layer, and the segments of the step."""

    step_head_writer = None  # layers prepare queries, keys and values themselves

    def __init__(self, spec: Any, pool: Any = None) -> None:
        self.spec, self.pool = spec, pool
        self.past: dict[str, list[mx.array]] = {}
        self.segments: Sequence[tuple[str, int]] = []

    def taking_in(self, *new: mx.array) -> Iterator[tuple[str, slice, list[mx.array]]]:
        """Of each segment: its sequence, its rows of the step, and its `new` behind all before."""
        assert {len(part) for part in new} == {sum(count for _, count in self.segments)}
        for name, rows in self.rows():
            parts = [part[rows] for part in new]
            before = self.past.get(name, [part[:0] for part in new])
            pairs = zip(before, parts, strict=True)
            self.past[name] = [mx.concatenate(pair) for pair in pairs]
            yield name, rows, self.past[name]

    def rows(self) -> Iterator[tuple[str, slice]]:
        """The sequence and the rows of each segment."""
        start = 0
        for name, count in self.segments:
            yield name, slice(start, start + count)
            start += count


def highest(scores: Any, count: int) -> Any:
    """The places of the highest scores, in their order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


class DenseLayerKV(DenseLayer):
    """One layer's keys and values."""

    def attend(self, queries, keys, values, softmax, choice=None, rows=None):
        assert keys.shape[1:] == (self.spec.num_kv_heads, self.spec.key_dim)
        assert values.shape[1:] == (self.spec.num_kv_heads, self.spec.value_dim)
        outputs = []
        for _, rows, past in self.taking_in(keys, values):
            if choice is None:
                outputs.append(self._over_past(queries[rows], past, softmax))
            elif isinstance(choice, RelativeBias):
                outputs.append(self._with_bias(queries[rows], past, choice, rows, softmax.scale))
            else:
                outputs.append(self._over_chosen(queries[rows], past, choice[rows], softmax))
        return mx.concatenate(outputs).flatten(1)

    def _with_bias(self, queries, past, bias, rows, scale):
        """Scores with a bias by distance, and a sink of each token and head; row by row."""
        keys, values = (np.array(part.astype(mx.float32)) for part in past)
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
            top = np.maximum(scores.max(-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
            outputs.append(np.einsum("hs,shd->hd", weights, values[start:stop]))
        return mx.array(np.stack(outputs))

    def _over_chosen(self, queries, past, seen, softmax):
        """`seen`: of each query, the tokens that each of some groups of heads sees.

        Or the compressed vectors (E, D) that it sees beside its window.
        """
        attended, given = [], softmax._asdict()
        for last, (query, groups) in enumerate(
            zip(queries, seen, strict=True), len(past[0]) - len(queries) + 1
        ):
            if self.spec.window is not None:
                near = past[0][max(last - self.spec.window, 0) : last]
                both = mx.concatenate([groups[:, None], near])
                attended.append(masked_attention(query[None], both, both, **given))
                continue
            parts = [mx.split(part, len(groups), axis=1) for part in past]
            heads = [
                masked_attention(of[None], *(part[i][mx.array(tokens)] for part in parts), **given)
                for i, (of, tokens) in enumerate(
                    zip(mx.split(query, len(groups)), groups, strict=True)
                )
            ]
            attended.append(mx.concatenate(heads, axis=1))
        return mx.concatenate(attended)

    def attend_again(self, queries, softmax, rows=None):
        outputs = [self._over_past(queries[at], self.past[n], softmax) for n, at in self.rows()]
        return mx.concatenate(outputs).flatten(1)

    def _over_past(self, queries, past, softmax):
        spec = self.spec
        seen = {"window": spec.window, "kept": spec.sinks, "chunked": spec.chunked}
        return masked_attention(queries, *past, **seen, **softmax._asdict())


class DenseLatentCache(DenseLayer):
    """One layer's latent vectors; segments of up to MAX_SHORT are absorbed."""

    MAX_SHORT = 8

    def attend(self, q_nope, q_rope, latent, k_rope, *, projection, scale, choice=None):
        """`choice`: positions that each row sees, under one head; None: all before it."""
        assert (latent.shape[1], k_rope.shape[1]) == (self.spec.latent_dim, self.spec.rope_dim)
        outputs = []
        for _, rows, (past,) in self.taking_in(mx.concatenate([latent, k_rope], axis=-1)):
            short = rows.stop - rows.start <= self.MAX_SHORT
            attend = self._absorbed if short else self._expanded
            if choice is None:
                outputs.append(attend(q_nope[rows], q_rope[rows], past, projection, scale))
                continue
            for row in range(rows.start, rows.stop):
                one, seen = slice(row, row + 1), past[mx.array(choice[row][0])]
                outputs.append(attend(q_nope[one], q_rope[one], seen, projection, scale))
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

    def attend(self, q_nope, q_rope, latent, k_rope, *, projection, scale, index):
        queries, weights = (np.array(part) for part in index[:2])
        keys, chosen = index[2:]
        choosing = self.spec.index_dim != 0
        assert not choosing or keys.shape[1] == self.spec.index_dim
        outputs, new = [], mx.concatenate([latent, k_rope], axis=-1)
        for _, rows, (past, known) in self.taking_in(new, keys):
            known = np.array(known)
            for row in range(rows.start, rows.stop):
                stop = len(known) - (rows.stop - row) + 1
                if choosing:
                    scores = np.maximum(queries[row] @ known[:stop].T, 0)  # (Hi, stop)
                    chosen[row] = mx.array(highest(weights[row] @ scores, self.spec.num_ranked))
                one, seen = slice(row, row + 1), past[chosen[row]]
                outputs.append(self._expanded(q_nope[one], q_rope[one], seen, projection, scale))
        return mx.concatenate(outputs)


class DensePooledCache(DenseLayer):
    """What all tokens of a sequence bring to an index, and the tokens that each of a step sees."""

    def choose(self, queries, weights, raw, positions):
        assert raw.shape[1] == self.spec.raw_dim
        seen, ratio = [], self.spec.ratio
        for _, rows, (whole, places) in self.taking_in(raw, mx.moveaxis(positions, -1, 0)):
            keys = np.zeros((0, self.spec.dim))
            if num_blocks := len(whole) // ratio:
                blocks = mx.unflatten(whole[: num_blocks * ratio], 0, (-1, ratio))
                firsts = places[: num_blocks * ratio : ratio]
                keys = np.array(self.pool(blocks, mx.moveaxis(firsts, 0, -1)))
            for row in range(rows.start, rows.stop):
                stop = len(whole) - (rows.stop - row) + 1
                scores = np.maximum(np.array(queries[row]) @ keys[: stop // ratio].T, 0)
                best = highest(np.array(weights[row]) @ scores, self.spec.num_ranked)
                tokens = [block * ratio + i for block in best.tolist() for i in range(ratio)]
                seen.append([[*tokens, *range(stop - stop % ratio, stop)]])
        return seen


class DenseCompressedCache(DenseLayer):
    """What all tokens of a sequence bring to blocks, and the vectors that each of a step sees."""

    def choose(self, queries, weights, raw, positions):
        assert raw.shape[1] == self.spec.raw_dim
        seen = []
        for _, rows, (whole,) in self.taking_in(raw):
            keys, vectors = self._blocks(whole)
            for row in range(rows.start, rows.stop):
                num = (len(whole) - (rows.stop - row) + 1) // self.spec.ratio
                if queries is None or not num:
                    seen.append(vectors[:num])
                    continue
                scores = np.maximum(np.array(queries[row]) @ keys[:num].T, 0)
                best = highest(np.array(weights[row]) @ scores, self.spec.num_ranked)
                seen.append(vectors[mx.array(best)])
        return seen

    def _blocks(self, whole):
        """Index keys and compressed vectors, one block after the other by itself."""
        spec, blocks = self.spec, []
        for stop in range(spec.ratio, len(whole) + 1, spec.ratio):
            first = stop - spec.ratio
            block, earlier = whole[None, first:stop], None
            if spec.carried:
                earlier = whole[None, max(first - spec.ratio, 0) : first or stop]
                earlier = earlier[..., : spec.carried]
            blocks.append(self.pool(block, earlier, mx.array([first])))
        if not blocks:
            return np.zeros((0, spec.index_dim)), mx.zeros((0, spec.dim))
        parts = [mx.concatenate(part) for part in zip(*blocks, strict=True)]
        return np.array(parts[0]), parts[-1]


class DenseBlockCache(DenseLayer):
    """The index keys of every sequence, and the tokens that each head of the index chooses."""

    def choose(self, queries, keys, served):
        assert keys.shape[1] == self.spec.dim
        queries, seen = np.array(queries), []
        for _, rows, (whole,) in self.taking_in(keys):
            known = np.array(whole)
            for row in range(rows.start, rows.stop):
                stop = len(known) - (rows.stop - row) + 1
                seen.append([self._seen(one @ known[:stop].T) for one in queries[row]])
        return seen

    def _seen(self, scores: np.ndarray) -> list[int]:
        size, stop = self.spec.block, len(scores)
        ranks = np.array([scores[i : i + size].max() for i in range(0, stop, size)])
        ranks[max(len(ranks) - self.spec.num_near, 0) :] = np.inf
        best = highest(ranks, self.spec.num_ranked)
        tokens = [block * size + i for block in best.tolist() for i in range(size)]
        return [token for token in tokens if token < stop]


def no_kernel():
    """Where states lie, which only kernels ask."""
    raise AssertionError("no kernel is used here")


class DenseStateCache(DenseLayer):
    """One recurrent layer's states of every sequence; each goes through the recurrence alone."""

    def recur(self, rows, advance):
        outputs = []
        zeros = [mx.zeros((1, *shape), getattr(mx, dtype)) for shape, dtype in self.spec.shapes]
        for name, at in self.rows():
            inputs, before = [x[at][None] for x in rows], self.past.get(name, zeros)
            (y, states), (_, replayed) = (
                advance(inputs, lambda before=before, count=count: (before, count), no_kernel)
                for count in (None, mx.array([at.stop - at.start]))
            )
            for state, again, zero in zip(states, replayed, zeros, strict=True):
                assert state.shape == zero.shape
                assert mx.allclose(state, again, atol=1e-5), "replayed to the end"
            self.past[name] = list(states)
            outputs.append(y[0])
        return mx.concatenate(outputs)


KINDS = {
    PooledSpec: DensePooledCache,
    CompressedSpec: DenseCompressedCache,
    BlockSpec: DenseBlockCache,
    StateSpec: DenseStateCache,
    KVSpec: DenseLayerKV,
    LatentSpec: DenseLatentCache,
}


def dense_cache(mixer, spec: CacheSpec):
    """Of the kind that a layer needs."""
    ranked = isinstance(spec, LatentSpec) and spec.num_ranked
    return (DenseRankedCache if ranked else KINDS[type(spec)])(spec, getattr(mixer, "pool", None))


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
