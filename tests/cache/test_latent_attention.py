"""Latent attention through pages and tails is attention over the expanded keys and values.

Random programs of prefill chunks and short steps over several sequences, in every storage format
and with windows, beside a reference that expands all vectors of a sequence and masks scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from cache.cache_layers import PAGE, Tokens
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.cache.inputs import CacheWork, Move, StepMetadata
from mlxinfer.cache.kv import KVCache
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache.pages import PageTable
from mlxinfer.cache_specs import LatentSpec
from mlxinfer.config import KVOptions
from mlxinfer.engine.batch import step_metadata
from mlxinfer.errors import InvalidRequestError

R, DR, DN, DV, HEADS = 32, 8, 12, 10, 3
SCALE = 0.3


@dataclass
class Projection:
    """Random up-projections of one layer."""

    keys: mx.array  # (H, dn, r)
    values: mx.array  # (H, dv, r)

    @classmethod
    def random(cls, rng: np.random.Generator) -> "Projection":
        keys = rng.normal(size=(HEADS, DN, R)) * R**-0.5
        values = rng.normal(size=(HEADS, DV, R)) * R**-0.5
        return cls(mx.array(keys.astype(np.float32)), mx.array(values.astype(np.float32)))

    key_dim, value_dim = DN, DV

    def absorb(self, q_nope: mx.array) -> mx.array:
        return (q_nope[:, :, None] @ self.keys)[:, :, 0]

    def value(self, latents: mx.array) -> mx.array:
        return (self.values @ latents[..., None])[..., 0]

    def expand(self, latents: mx.array) -> tuple[mx.array, mx.array]:
        columns = latents[:, None, :, None]
        return (self.keys @ columns)[..., 0], (self.values @ columns)[..., 0]


@dataclass
class Running:
    slot: int
    table: PageTable
    num_computed: int = 0
    num_sealed: int = 0
    vectors: list[np.ndarray] = field(default_factory=list)  # (r + dr) as they are stored


class World:
    """A cache of one latent layer, its sequences, and the reference."""

    def __init__(self, options: KVOptions, seed: int) -> None:
        specs = [LatentSpec(R, DR)]
        layers = lay_out(specs, options, dtype=mx.float32, key_bias=False)
        self.spec, self.fmt = layers[0].spec, layers[0].formats[0]
        self.cache = KVCache(
            layers,
            page_size=PAGE,
            max_batch=4,
            prefill_chunk=64,
            budget_bytes=1 << 24,
            num_pages=60,
        )
        self.rng = np.random.default_rng(seed)
        self.projection = Projection.random(self.rng)
        self.allocator = self.cache.groups[0].allocator
        self.window = self.cache.groups[0].window
        kept = self.window.kept_pages(PAGE)
        self.sequences = [Running(slot, PageTable(PAGE, num_kept=kept)) for slot in range(4)]
        self.cache.make_room(4)

    def step(self, counts: Sequence[int]) -> None:
        """So many new tokens of each sequence; more than 8 are a prefill chunk."""
        moves, short, long = [], [], []
        for sequence, count in zip(self.sequences, counts, strict=True):
            first = self.window.first_page(sequence.num_computed, PAGE)
            self.allocator.release(sequence.table.drop_before(first))
            stop = sequence.num_computed + count
            missing = -(-(stop - sequence.table.end) // PAGE)
            if missing > 0:
                sequence.table.append(self.allocator.allocate(missing))
            full = sequence.num_computed - sequence.num_computed % PAGE
            last = sequence.num_computed if count > 8 else full  # a chunk reads pages alone
            if count and last > sequence.num_sealed:
                moves.append(Move([sequence.table], sequence.slot, sequence.num_sealed, last))
                sequence.num_sealed = full
        self.cache.make_room(4)
        self.cache.carry_out(CacheWork(seal=moves))
        row, order = 0, []
        chunks = [(s, n) for s, n in zip(self.sequences, counts, strict=True) if n]
        for sequence, count in sorted(chunks, key=lambda c: (c[1] > 8, c[1] > 1)):
            start, sealed = sequence.num_computed, sequence.num_sealed
            tokens = Tokens(row, start, count, sealed, sequence.slot, [sequence.table])
            (long if count > 8 else short).append(tokens)
            order.append(sequence)
            row += count
            sequence.num_computed += count
            if count > 8:
                sequence.num_sealed = sequence.num_computed - sequence.num_computed % PAGE
        if row:
            self._attend(step_metadata(short, long), [*short, *long], order, row)

    def _attend(
        self, segments: StepMetadata, parts: list[Tokens], order: list[Running], num_rows: int
    ) -> None:
        draw = self.rng.normal
        q_nope = draw(size=(num_rows, HEADS, DN)).astype(np.float32)
        q_rope = draw(size=(num_rows, HEADS, DR)).astype(np.float32)
        latent = draw(size=(num_rows, R)).astype(np.float32)
        k_rope = draw(size=(num_rows, DR)).astype(np.float32)
        self.cache.begin_step(segments)
        (layer,) = self.cache.paged
        arrays = [mx.array(a) for a in (q_nope, q_rope, latent, k_rope)]
        attended = np.array(layer.attend(*arrays, projection=self.projection, scale=SCALE))
        assert attended.shape == (num_rows, HEADS, DV)
        stored = np.array(self._stored(arrays[2], arrays[3]))
        for tokens, sequence in zip(parts, order, strict=True):
            rows = slice(tokens.row, tokens.row + tokens.num_tokens)
            sequence.vectors += list(stored[rows])
            expected = self._reference(q_nope[rows], q_rope[rows], sequence, tokens.start)
            np.testing.assert_allclose(attended[rows], expected, atol=2e-5, rtol=2e-5)

    def _stored(self, latent: mx.array, k_rope: mx.array) -> mx.array:
        """What comes back of vectors: only the latent part is rotated, and back again."""
        rotates, fmt = self.fmt.rotates, self.fmt
        rotated = mx.hadamard_transform(latent) if rotates else latent
        vectors = fmt.decode(fmt.encode(mx.concatenate([rotated, k_rope], axis=-1)), mx.float32)
        back = mx.hadamard_transform(vectors[:, :R]) if rotates else vectors[:, :R]
        return mx.concatenate([back, vectors[:, R:]], axis=-1)

    def _reference(
        self, q_nope: np.ndarray, q_rope: np.ndarray, sequence: Running, start: int
    ) -> np.ndarray:
        vectors = np.stack(sequence.vectors)
        keys, values = (np.array(a) for a in self.projection.expand(mx.array(vectors[:, :R])))
        scores = np.einsum("qhd,khd->hqk", q_nope, keys)
        scores += np.einsum("qhd,kd->hqk", q_rope, vectors[:, R:])
        queries = start + np.arange(len(q_nope))[:, None]
        positions = np.arange(len(vectors))[None]
        seen = positions <= queries
        if self.spec.window is not None:
            seen &= (positions > queries - self.spec.window) | (positions < self.spec.sinks)
        scores = np.where(seen, scores * SCALE, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values)


OPTIONS = (
    KVOptions(), KVOptions(bits=(8, 8)), KVOptions(bits=(4, 4)), KVOptions(window=20, sinks=3),
    KVOptions(bits=(8, 8), window=33),
)  # fmt: skip
counts = st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 8, 9, 16, 40]), min_size=4, max_size=4)


@given(
    steps=st.lists(counts, min_size=1, max_size=8), which=st.integers(0, 4), seed=st.integers(0, 99)
)
def test_equals_attention_over_expanded_keys(steps: list[list[int]], which: int, seed: int) -> None:
    world = World(OPTIONS[which], seed)
    for step in steps:
        world.step(step)


@pytest.mark.alike
@pytest.mark.parametrize("which", range(5))
def test_long_contexts_keep_the_answers_of_dense_attention(which: int) -> None:
    world = World(OPTIONS[which], seed=7)
    world.step([60, 0, 40, 9])
    for _ in range(40):
        world.step([1, 1, 1, 1])
    world.step([1, 50, 8, 1])
    world.step([3, 1, 1, 8])


@pytest.mark.parametrize(
    ("spec", "bits", "message"),
    [
        (LatentSpec(24, 8), (4, 4), "power of two"),
        (LatentSpec(32, 8), (8, 4), "one number"),
        (LatentSpec(32, 8), (None, 4), "one number"),
        (LatentSpec(32, 4), (8, 8), "multiple of 8"),
    ],
)
def test_formats_that_a_latent_cannot_have_are_refused(
    spec: LatentSpec, bits: tuple[int | None, int | None], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        lay_out([spec], KVOptions(bits=bits), dtype=mx.float32, key_bias=False)
