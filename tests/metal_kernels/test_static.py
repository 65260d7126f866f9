"""What Metal's compiler would refuse of every variant that any test runs, also of slow sweeps.

Nothing is run: a variant is composed as MLX would, and read by `lint`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_cpu import requires_compiler
from metal_cpu.capture import capture
from metal_cpu.lint import lint
from models.runs import alike, every
from scenes import Scene, build
from test_add_norm_metal import NORMS, inputs
from test_gate_up_metal import DTYPES, FUNCTIONS, drawn, form_of
from test_kv_write_metal import HEAD_DIMS, heads_of, tokens_of
from test_paged_attention_sweep import ALL, CHUNKS, FORMATS, ROWS
from test_paged_attention_sweep import DTYPES as NAMED
from test_sample_metal import one

from mlxinfer import metal_kernels
from mlxinfer.metal_kernels import gate_up
from mlxinfer.metal_kernels.add_norm import MAX_DIMS, AddNorm, add_norm
from mlxinfer.metal_kernels.kv_write import kv_write
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.mla_attention import mla_attention_on_metal
from mlxinfer.metal_kernels.paged_attention import Softmax, paged_attention_on_metal
from mlxinfer.metal_kernels.sample import sample, settings_array
from mlxinfer.metal_kernels.selfcheck import KINDS
from mlxinfer.metal_kernels.variants import Variant

pytestmark = requires_compiler


class Reader:
    """A device that runs nothing: its outputs are zeros. It notes what is refused."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.files: set[str] = set()  # that were read

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        self.refused |= {str(fault) for fault in lint(capture(launch, inputs).kernel)}
        self.files |= {f"{launch.kernel.name}.metal", *launch.kernel.includes}
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]


def read(call: Callable[[], object]) -> set[str]:
    """The files that were read."""
    with running_on(reader := Reader()):
        call()
    assert reader.files
    assert not reader.refused
    return reader.files


def read_sample(variant: Variant) -> set[str]:
    """All forms of a kernel, with all that its self-check takes."""
    case = KINDS[variant.kind].case(variant)
    return set().union(*[read(form) for form in (case.kernel, *case.forms.values())])


@pytest.mark.parametrize(
    "variant", alike([v for k in KINDS.values() for v in k.samples[1:]]), ids=str
)
def test_samples_of_the_report(variant: Variant) -> None:
    read_sample(variant)


def test_every_file_is_read_in_the_first_samples() -> None:
    """Of each kind, and of attention also codes: a second or two where none was read before."""
    first = [kind.samples[0] for kind in KINDS.values()]
    codes = KINDS["paged_attention"].samples[1]
    files = set().union(*map(read_sample, [*first, codes]))
    folder = Path(metal_kernels.__file__).parent
    assert files == {path.name for path in folder.iterdir() if path.suffix in (".metal", ".h")}


def attention(dtype: str, bits: str, dim: int, rows: tuple[int, int], prefill: bool) -> None:
    group, queries = rows
    how = {"key_dim": dim, "value_dim": dim, "dtype": NAMED[dtype], "bits": FORMATS[bits]}
    split = None if prefill else 1
    scene = build(Scene([70], [queries], group=group, prefill=prefill, item_blocks=split, **how))
    softmax = Softmax(1.0, scene.sink_logits if group % 4 == 0 else None)
    paged_attention_on_metal(
        *(scene.queries, scene.keys, scene.values, scene.plan, softmax),
        value_dim=dim,
        log_sums=not prefill,
    )


@pytest.mark.alike
@pytest.mark.parametrize("prefill", [False, True], ids=["tokens", "prompts"])
@pytest.mark.parametrize(("dtype", "bits", "dim"), every(29, ALL))
def test_attention_compiles_cleanly(dtype: str, bits: str, dim: int, prefill: bool) -> None:
    few_rows = {False: ROWS[1::5], True: [(group, sum(counts)) for group, counts in CHUNKS[1::4]]}
    for rows in few_rows[prefill]:
        read(partial(attention, dtype, bits, dim, rows, prefill))


@pytest.mark.alike
@pytest.mark.parametrize(("dim", "dtype"), every(7, product(HEAD_DIMS, DTYPES)))
def test_sources_of_kv_writes_keep_the_rules_of_metal(dim: int, dtype: mx.Dtype) -> None:
    for bits in ((None, None), (8, 4), (4, None), (None, 8)):
        heads = heads_of(dim, bits=(8 if bits[0] == 4 and dim % 32 else bits[0], bits[1]))
        read(partial(kv_write, *tokens_of(heads, 1, dtype), heads))


@pytest.mark.parametrize("codes", every(5, [(codes,) for codes in [*gate_up.CODES, gate_up.PLAIN]]))
def test_sources_of_gate_up_keep_the_rules_of_metal(codes: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    for function, (dtype, rows) in zip(
        FUNCTIONS, product(DTYPES, (1, gate_up.MAX_ROWS)), strict=False
    ):
        form = form_of(function, in_dims=(codes[1] or 8) * 4, inner=8, codes=codes, dtype=dtype)
        x = mx.zeros((rows, form.in_dims), dtype)
        read(partial(gate_up.gate_up, x, drawn(rng, form), form))


@pytest.mark.parametrize("dtype", every(3, DTYPES))
def test_sources_of_norms_and_latents_keep_the_rules_of_metal(dtype: mx.Dtype) -> None:
    for norms, dims in product(NORMS, (8, MAX_DIMS)):
        form = AddNorm(dims, dtype, *norms)
        arrays = inputs(form, 1)
        read(partial(add_norm, *arrays[:2], form, *arrays[2:]))
    for bits, group in product((None, 8), (16, 128)):
        scene = Scene(
            [33], [1], group=group, dtype=dtype, bits=(bits, None), item_blocks=1, key_dim=576
        )
        latent = build(scene)
        read(lambda i=latent: mla_attention_on_metal(i.queries, i.keys, i.plan, scale=1.0))
    for vocab_size in (33, 32_000):
        logits = mx.zeros((1, vocab_size), dtype)
        read(lambda x=logits: sample(x, settings_array(one()), None))
