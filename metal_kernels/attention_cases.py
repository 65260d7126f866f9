"""Self-checks of the attention kernels: sequences over shuffled pages, tolerances. Knows no GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from .attention_plan import (
    AttentionPlan,
    AttentionPlanner,
    Ints,
    Shape,
    page_table,
    prefill_shape,
    registers,
    threadgroup_shape,
    tile_sizes,
)
from .gathered_attention import (
    FUSED,
    GATHERED,
    gathered_attention,
    gathered_fused,
    gathered_pages,
    whole_mask,
)
from .kv_write import stored
from .mla_attention import mla_attention_gathered, mla_attention_on_metal, row_blocks
from .paged_attention import HIDDEN, Softmax, paged_attention_gathered, paged_attention_on_metal
from .prompt_attention import BLOCKS, WHOLE, attend_over_blocks, attend_to_all, sees_before
from .stored import FORMATS, PLAIN, KVFormat, Plane
from .variants import KERNEL, Case, Form, Kind, Outputs, Variant

PAGE = 16
PAGED, PREFILL, MLA = "paged_attention", "prefill_attention", "mla_attention"
STARTS = (5, 70, 33)  # positions of first queries: a tail alone, pages and a tail
PAIRS = f"{KERNEL}, sums in pairs"  # the way of kernels that keep no matrices in their loop
QUERIES = 40  # of a chunk of a prompt
LOADS = ((1, 512), (1, 16_384), (4, 4_096), (16, 2_048))  # sequences, and tokens of each
PREFILL_LOADS = ((64, 4_096), (512, 4_096), (2_048, 4_096))  # tokens of a chunk, and up to its end
MANY_STARTS = (8_300, 150, 40)  # of 519, 10 and 3 blocks of 16 tokens
LOUD = 264.0  # its square is beyond float16, and it has few enough bits for bfloat16
ROUNDING = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # of outputs below 1
KEY_DIM, LATENT_DIM = 576, 512  # of vectors of a latent cache, and of their values


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm(Form):
    """The constants of an attention kernel.

    Attributes:
        queries: most query tokens of a sequence in one step; of prompts it does not matter.
        joint_dim: of vectors that hold keys and values both; 0: there are none.
        log_sums: log-sum-exps are asked for, as by `attend_in_tiles`, which joins blocks by them.
    """

    dtype: mx.Dtype
    key_dim: int
    value_dim: int
    group: int
    key_format: KVFormat = PLAIN
    value_format: KVFormat = PLAIN
    queries: int = 1
    sink_logits: bool = False
    joint_dim: int = 0
    log_sums: bool = False

    def variant(self, kind: str) -> Variant:
        return Variant.from_form(kind, self)


def mla_variant(
    dtype: mx.Dtype, num_heads: int, fmt: KVFormat, queries: int = 1, key_dim: int = KEY_DIM
) -> Variant:
    """The kernel that `mla_attention_on_metal` compiles; keys are whole vectors."""
    sizes = key_dim, LATENT_DIM, num_heads, fmt, fmt, queries
    return AttentionForm(dtype, *sizes, joint_dim=key_dim, log_sums=True).variant(MLA)


@dataclass(frozen=True, slots=True)
class Scene:
    """Some sequences of as many queries each, and their cache."""

    queries: mx.array  # (T, H * G, D)
    keys: Plane
    values: Plane
    starts: Ints
    sealed: Ints
    tables: list[Ints]
    page_size: int = PAGE

    def plan(self, **how: Any) -> AttentionPlan:
        count = len(self.queries) // len(self.starts)
        planner = AttentionPlanner(
            counts=np.full_like(self.starts, count),
            sealed=self.sealed,
            slots=np.arange(len(self.starts), dtype=np.int32),
            page_size=self.page_size,
            **how,
        )
        return planner(self.starts, page_table(self.tables))


Change = Callable[[mx.array], mx.array]


def _same(drawn: mx.array) -> mx.array:
    return drawn


def _last(drawn: mx.array, numbers: mx.array | float) -> mx.array:
    """Vectors (..., D) of zeros, except their last numbers."""
    last = mx.arange(drawn.shape[-1]) == drawn.shape[-1] - 1
    return mx.broadcast_to(mx.where(last, numbers, 0.0), drawn.shape)


def _by_token(drawn: mx.array) -> mx.array:
    lengths = LOUD * (1 + mx.arange(drawn.shape[-2]) % 3)
    return _last(drawn, lengths[:, None])


@dataclass(frozen=True, slots=True)
class Figures:
    """How large the numbers of a scene are: changes to keys, values and queries below 1."""

    keys: Change = _same
    queries: Change = _same
    size: float = 1.0  # of values, where the format has it: codes end at 65,504, as float16 does
    codes_size: float = 1.0

    def size_of(self, form: AttentionForm) -> float:
        small = form.value_format.bits > 0 or form.dtype == mx.float16
        return self.codes_size if small else self.size

    def values(self, form: AttentionForm) -> Change:
        return lambda drawn: drawn * self.size_of(form)


FAINT = 2.0**-64  # its square is subnormal; in float16 it is zero
EVEN = Figures()
LARGE_VALUES = Figures(size=2.0**20, codes_size=2.0**14)
EXTREMES = (
    LARGE_VALUES,
    Figures(_by_token, lambda drawn: _last(drawn, LOUD / 3)),  # beyond float16
    Figures(_by_token, lambda drawn: _last(drawn, -LOUD)),  # ... below zero, all of them
    Figures(lambda drawn: drawn * FAINT, lambda drawn: drawn * FAINT),
)


def in_shared_tails(keys: Plane, values: Plane) -> tuple[Plane, Plane]:
    pairs = zip(keys.tails, values.tails, strict=True)
    tails = [mx.concatenate([*pair], axis=1) for pair in pairs]
    heads = keys.tail_heads
    keys = replace(keys, tails=tails, tail_heads=2 * heads)
    return keys, replace(values, tails=tails, tail_heads=2 * heads, tail_head=heads)


def in_one_vector(whole: Plane, key_dim: int, value_dim: int) -> tuple[Plane, Plane]:
    """Keys, the last numbers of vectors, and values, the first ones."""
    return whole.cut(whole.vector_dim - key_dim, key_dim), whole.cut(0, value_dim)


def build_scene(
    form: AttentionForm,
    starts: Ints,
    kv_heads: int,
    queries: int,
    *,
    shuffled: bool = True,
    figures: Figures = EVEN,
    page_size: int = PAGE,
) -> Scene:
    """Random sequences, always the same.

    Args:
        starts: (B,) position of the first query of each.
        kv_heads: one where keys and values are one latent vector.
        shuffled: pages lie anywhere; else each sequence's lie in order, one after the other.
    """
    dtype, key_dim = form.dtype, form.key_dim
    sealed = starts // page_size * page_size
    counts = sealed // page_size
    pages = np.arange(counts.sum(), dtype=np.int32)
    if shuffled:
        pages = np.random.default_rng(0).permutation(pages)
    tables = np.split(pages, np.cumsum(counts)[:-1])
    num_tokens = max(len(pages), 1) * page_size
    keys_of_draws = iter(mx.random.split(mx.random.key(0), 5))

    def drawn(*shape: int) -> mx.array:
        return mx.random.uniform(-1, 1, shape, key=next(keys_of_draws))

    def plane(dim: int, fmt: KVFormat, change: Change) -> Plane:
        shapes = (kv_heads, num_tokens, dim), (len(starts), kv_heads, 2 * page_size, dim)
        pages, tails = (stored(change(drawn(*shape)), fmt, dtype) for shape in shapes)
        return Plane(fmt, pages, tails, dim, kv_heads)

    keys = plane(form.joint_dim or key_dim, form.key_format, figures.keys)
    if form.joint_dim:
        keys, values = in_one_vector(keys, key_dim, form.value_dim)
    else:
        values = plane(form.value_dim, form.value_format, figures.values(form))
        if key_dim == form.value_dim and form.key_format == form.value_format:
            keys, values = in_shared_tails(keys, values)
    rows = drawn(len(starts) * queries, kv_heads * form.group, key_dim)
    return Scene(
        *(figures.queries(rows).astype(dtype), keys, values, starts, sealed, tables, page_size)
    )


def _case(variant: Variant) -> Case:
    """Whole sequences in one pass; windows, sinks and many items in two; extreme numbers."""
    form, heads = variant.form, 1 if variant.kind == MLA else 2
    starts = np.array(STARTS[:2] if variant.kind == PREFILL else STARTS, np.int32)
    scene, many = _scene(variant, starts, heads), _many_items(variant)
    split = {"window": 24, "sinks": 4}
    calls: list[tuple[Scene, AttentionPlan, float | None]] = [
        (scene, _plan(variant, scene), None),
        (scene, _plan(variant, scene, **split), 20.0),
        (many, _plan(variant, many, item_blocks=1), None),
    ]
    sizes = [1.0] * len(calls)  # of outputs
    for figures in EXTREMES:
        if figures is LARGE_VALUES and form.joint_dim:
            continue  # keys would be as large
        of_values = figures.size_of(form)
        extreme = _scene(variant, starts, heads, figures=figures)
        calls.append((extreme, _plan(variant, extreme, item_blocks=1), None))
        sizes.append(of_values)
    # What the engine makes of it; log-sum-exps are of up to 8.
    rounding = ROUNDING[str(variant["dtype"])]
    of_sums = [8 * rounding] if form.log_sums else []
    tolerances = [t for i, size in enumerate(sizes) for t in (size * rounding, *of_sums * (i < 3))]

    def outputs(on_metal: bool, pairs: bool = False) -> list[mx.array]:
        outputs = []
        for i, (of, plan, soft_cap) in enumerate(calls):
            arrays = _attend(variant, of, plan, on_metal=on_metal, soft_cap=soft_cap, pairs=pairs)
            outputs += arrays if i < 3 else arrays[:1]  # sums of extreme scores are as large
        return outputs

    forms = {PAIRS: partial(outputs, True, True)} if has_pairs(variant) else {}
    return Case(partial(outputs, True), partial(outputs, False), tuple(tolerances), forms)


def has_pairs(variant: Variant) -> bool:
    return variant.kind == PAGED and not _decode_shape(variant.form).shares


def _many_items(variant: Variant) -> Scene:
    """More items than the second pass has SIMD groups, and than it has threads; pages of 32.

    A page of the first sequence was released: it holds what others wrote.
    """
    starts = MANY_STARTS[1:] if variant.kind == PREFILL else MANY_STARTS
    how: dict[str, Any] = {"page_size": 2 * PAGE}
    scene = _scene(variant, np.array(starts, np.int32), 1, **how)
    scene.tables[0][2] = -1
    return scene


def _timed(variant: Variant, load: int, context: int) -> Case:
    """So many sequences, or tokens of a chunk, up to such a context.

    Beside it stands all that the engine can do without the kernel. None of that gives
    log-sum-exps, so only outputs are compared.
    """
    if variant.kind == PREFILL:
        heads, starts, queries = 4, np.array([context - load], np.int32), load
    else:
        heads, queries = 1 if variant.kind == MLA else 4, 0
        starts = np.full(load, context, np.int32)
    scene = _scene(variant, starts, heads, queries=queries, shuffled=False)
    plan = _plan(variant, scene)
    # Outputs are averages of numbers below 1: of N, so large at most. A chunk begins with few.
    size = min(1.0, 6 / max(1, starts[0]) ** 0.5)

    def attended(**how: Any) -> list[mx.array]:
        return _attend(variant, scene, plan, **how)[:1]

    forms = {PAIRS: partial(attended, on_metal=True, pairs=True)} if has_pairs(variant) else {}
    return Case(
        partial(attended, on_metal=True),
        partial(attended, on_metal=False),
        (size * ROUNDING[str(variant["dtype"])],),
        forms,
        _over_pages(variant, scene) if variant.kind == PREFILL else _by_gathering(variant, scene),
    )


def _scene(
    variant: Variant, starts: Any, heads: int, *, queries: int = QUERIES, **how: Any
) -> Scene:
    """Sequences with their first queries at `starts`; a prompt's chunk lies in whole pages."""
    form: AttentionForm = variant.form
    if variant.kind != PREFILL:
        return build_scene(form, starts, heads, form.queries, **how)
    size = how.get("page_size", PAGE)
    sealed = -(-(starts + queries) // size) * size
    return replace(build_scene(form, sealed, heads, queries, **how), starts=starts)


def _plan(
    variant: Variant,
    scene: Scene,
    *,
    window: int | None = None,
    sinks: int = 0,
    item_blocks: int | None = None,
) -> AttentionPlan:
    """One pass over everything that is seen; two behind a window, and where items are short."""
    heads = len(scene.keys.pages[0])
    if variant.kind == PREFILL:
        num_heads, key_dim = scene.queries.shape[1:]
        sizes = tile_sizes(num_heads, heads, key_dim, variant.form.value_dim)
        return scene.plan(**sizes, window=window, sinks=sinks, item_blocks=item_blocks)
    if variant.kind == MLA:
        heads = row_blocks(variant.form.queries * variant.form.group)
    if window is not None:
        item_blocks = 1
    return scene.plan(kv_heads=heads, window=window, sinks=sinks, item_blocks=item_blocks)


def _attend(
    variant: Variant,
    scene: Scene,
    plan: AttentionPlan,
    *,
    on_metal: bool,
    soft_cap: float | None = None,
    pairs: bool = False,
) -> list[mx.array]:
    form, scale = variant.form, _scale(variant)
    if variant.kind == MLA:
        mla = mla_attention_on_metal if on_metal else mla_attention_gathered
        return mla(scene.queries, scene.keys, plan, scale=scale)
    form_of = partial(paged_attention_on_metal, pairs=pairs)
    paged = form_of if on_metal else paged_attention_gathered
    sinks = mx.linspace(-1, 1, scene.queries.shape[1]) if form.sink_logits else None
    arguments = scene.queries, scene.keys, scene.values, plan, Softmax(scale, sinks, soft_cap)
    return paged(*arguments, value_dim=form.value_dim, log_sums=form.log_sums)


def _by_gathering(variant: Variant, scene: Scene) -> dict[str, Outputs]:
    form, size = variant.form, scene.page_size
    # All sequences end where a page and half a tail end: their queries lie at its front.
    seen = np.arange(2 * size) <= np.arange(form.queries)[:, None]
    mask = mx.array(np.where(seen, np.float32(0), np.float32(HIDDEN)))
    tail_mask = mx.broadcast_to(mask, (len(scene.starts), 1, *mask.shape))
    sinks = mx.linspace(-1, 1, scene.queries.shape[1]) if form.sink_logits else None
    softmax, ids = Softmax(_scale(variant), sinks), mx.array(np.stack(scene.tables))
    keys, values = (replace(plane, dtype=form.dtype) for plane in (scene.keys, scene.values))

    def attended(fused: bool) -> list[mx.array]:
        of_pages = gathered_pages(keys, values, ids, size)
        pages = of_pages[0].swapaxes(0, 1), of_pages[1].swapaxes(0, 1)
        tails = keys.decode(keys.own_tails(size)), values.decode(values.own_tails(size))
        if fused:
            both = whole_mask(None, tail_mask, pages)
            outputs = gathered_fused(scene.queries, pages, tails, both, softmax)
        else:
            outputs = gathered_attention(scene.queries, pages, tails, (None, tail_mask), softmax)
        return [outputs.reshape(*scene.queries.shape[:2], -1)]

    ways: dict[str, Outputs] = {GATHERED: partial(attended, False)}
    return ways if variant.kind == MLA else {**ways, FUSED: partial(attended, True)}


def _over_pages(variant: Variant, scene: Scene) -> dict[str, Outputs]:
    """The ways to attend to a chunk without a kernel, over the pages of its sequence as one run.

    What is stored in codes is decoded: all of it, or a block after the other.
    """
    form, count, (start,) = variant.form, len(scene.queries), scene.starts.tolist()
    queries, softmax = scene.queries.swapaxes(0, 1), Softmax(_scale(variant))
    if form.sink_logits:
        softmax = softmax._replace(sinks=mx.linspace(-1, 1, len(queries)).astype(form.dtype))
    keys, values = (replace(plane, dtype=form.dtype) for plane in (scene.keys, scene.values))

    def read(first: int, stop: int, after: mx.array | None) -> tuple[mx.array, mx.array]:
        read_keys = keys.read_runs([(first, stop)], after)
        return read_keys, values.read_runs([(first, stop)], after=read_keys)

    def whole() -> list[mx.array]:
        return [attend_to_all(queries, *read(0, start + count, None), softmax).swapaxes(0, 1)]

    def blocks() -> list[mx.array]:
        positions = np.arange(start + count, dtype=np.int32)
        attended = attend_over_blocks(queries, read, positions, sees_before(start), softmax)
        return [attended.swapaxes(0, 1)]

    # Latents are expanded block by block: all at once would grow with the context.
    return {BLOCKS: blocks} if form.log_sums else {BLOCKS: blocks, WHOLE: whole}


def _scale(variant: Variant) -> float:
    return float(4 / variant.form.key_dim**0.5)


def _sample(
    kind: str, dim: int, group: int, bits: tuple[int, int] = (0, 0), **more: Any
) -> Variant:
    dtype = mx.float16 if kind == PAGED else mx.bfloat16
    how: dict[str, Any] = {"dtype": dtype, "key_dim": dim, "value_dim": dim, "group": group, **more}
    how |= {"key_format": FORMATS[bits[0]], "value_format": FORMATS[bits[1]]}
    return AttentionForm(**how).variant(kind)


def _registers(variant: Variant) -> int:
    form: AttentionForm = variant.form
    dims: dict[str, Any] = {"key_dim": form.key_dim, "value_dim": form.value_dim}
    itemsize = form.dtype.size
    if variant.kind == MLA:  # outputs, queries and latents of an eighth; 16 rows, 16 tokens
        held = form.key_dim // 16
        return form.value_dim // 16 + held * itemsize // 4 + held + 8 + 14
    if variant.kind == PREFILL:
        return registers(prefill_shape(**dims), **dims, itemsize=itemsize)
    codes = form.key_format.bits + form.value_format.bits > 0
    return registers(_decode_shape(form), **dims, itemsize=itemsize, codes=codes)


def _decode_shape(form: AttentionForm) -> Shape:
    """The threadgroup of `form.queries` tokens of each sequence."""
    codes = form.key_format.bits + form.value_format.bits > 0
    return threadgroup_shape(
        form.queries * form.group,
        key_dim=form.key_dim,
        value_dim=form.value_dim,
        itemsize=4 if codes else form.dtype.size,
    )


def _accumulators(variant: Variant) -> int:
    form: AttentionForm = variant.form
    if variant.kind == MLA:  # an eighth of 16 rows
        return form.value_dim // 32
    dims: dict[str, Any] = {"key_dim": form.key_dim, "value_dim": form.value_dim}
    shape = prefill_shape(**dims) if variant.kind == PREFILL else _decode_shape(form)
    return shape.fragments * form.value_dim // 8 // shape.halves


_SHARED_FILES = (
    "attention_fragments.h", "attention_outputs.h", "attention_softmax.h", "paged_spans.h",
    "stored_codes.h", "attention_reduce.metal", "attention_plan.py", "paged_attention.py",
    "chips.py", "stored.py",
)  # fmt: skip
PAGED_FILES = ("paged_attention.metal", "tiled_attention.metal", *_SHARED_FILES)
_kind = partial(Kind, case=_case, timed=_timed, registers=_registers, accumulators=_accumulators)
PAGED_ATTENTION = _kind(
    name=PAGED,
    files=PAGED_FILES,
    loads=LOADS,
    samples=(
        _sample(PAGED, 128, 4),
        _sample(PAGED, 128, 8, (4, 4), queries=4),
        _sample(PAGED, 64, 8, (8, 4), sink_logits=True),
        _sample(PAGED, 128, 4, (8, 8)),
        _sample(PAGED, 256, 2, dtype=mx.bfloat16),
        _sample(PAGED, 80, 1, (4, 4)),
        _sample(PAGED, 512, 8, (8, 8), joint_dim=640),
        _sample(PAGED, 128, 8, queries=2),  # twice as many sums as the first
    ),
)
PREFILL_ATTENTION = _kind(
    name=PREFILL,
    files=PAGED_FILES,
    loads=PREFILL_LOADS,
    samples=(
        _sample(PREFILL, 256, 4),
        _sample(PREFILL, 128, 4, (8, 8)),
        _sample(PREFILL, 256, 8, (4, 4)),
        _sample(PREFILL, 512, 8),
        _sample(PREFILL, 512, 8, joint_dim=640),
        _sample(PREFILL, 192, 1, value_dim=128, log_sums=True),
    ),
)
MLA_ATTENTION = _kind(
    name=MLA,
    files=("mla_attention.metal", "mla_attention.py", *_SHARED_FILES),
    loads=LOADS,
    samples=(
        mla_variant(mx.float16, 16, PLAIN),
        mla_variant(mx.bfloat16, 16, FORMATS[8], queries=2),
        mla_variant(mx.bfloat16, 16, PLAIN, key_dim=LATENT_DIM),
    ),
)
