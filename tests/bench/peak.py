"""`bench peak`: memory at the end of one long context, for each KV format. Ours alone.

Attention over a long prompt takes minutes on a CPU, and the peak comes at its end: so the model is
run for the last chunk and the answer only, over a cache of full length.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import mlx.core as mx

from mlxinfer.bench.report import Report, Table
from mlxinfer.config import KVOptions
from mlxinfer.layers.step import Step
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench.checkpoints import Dense, random_prompt, write_checkpoint
from tests.bench.kv import peak_bytes
from tests.bench.served import Ask, OurServer, serve

CHUNK = 256  # prompt tokens a step, mlxinfer's default
ANSWER = 2
FORMATS: tuple[tuple[str, KVOptions], ...] = (
    ("plain", KVOptions()),
    ("8", KVOptions(bits=(8, 8))),
    ("8, 4", KVOptions(bits=(8, 4))),
    ("4", KVOptions(bits=(4, 4))),
)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes beside the weights."""

    label: str
    peak: int
    cache: int  # pages and tails at the end


class LastChunkModel:
    """A model that works from some position on; before that its hidden states are zeros."""

    def __init__(self, model: Model, start: int) -> None:
        self.config = model.config
        self.cache_specs, self.mixers = model.cache_specs, model.mixers
        self.activation_dtype = model.activation_dtype
        self.rope_variant = model.rope_variant
        self.kernels = model.kernels
        self.lacks = model.lacks
        self.logits = model.logits
        self._model = model
        self._left = start

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        """(T,) tokens -> (T, hidden)."""
        if self._left > 0:
            self._left -= ids.shape[0]
            return mx.zeros((ids.shape[0], self.config.hidden_size), self.activation_dtype)
        return self._model(ids, step)


def measure(model: Model, label: str, kv: KVOptions, context: int) -> Peak:
    """The peak of one prompt of `context` tokens and a short answer."""
    prompt = random_prompt(context, model.config.vocab_size, 0)
    cache = 0

    def run() -> None:
        nonlocal cache
        skipping = cast(Model, LastChunkModel(model, context - CHUNK))
        server = OurServer(skipping, kv=kv, prefill_chunk=CHUNK, max_batch=1)
        serve(server, [Ask("long", [("user", prompt)], ANSWER)])
        cache = server.loop.cache.bytes_allocated

    peak = peak_bytes(run)
    return Peak(label, peak, cache)


def run(*, context: int = 16_384, layers: int = 36, dtype: str = "bfloat16") -> Report:
    """Every format over a model with one KV head of 64."""
    dense = Dense(
        hidden=64,
        inner=128,
        layers=layers,
        heads=1,
        kv_heads=1,
        head_dim=64,
        vocab=256,
        max_context=context + ANSWER,
    )
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), dense)
        model = load(Path(folder), dtype=dtype)
        found = [measure(model, label, kv, context) for label, kv in FORMATS]
    rows = [
        [
            p.label,
            f"{p.peak / 1e6:,.1f}",
            f"{p.cache / 1e6:,.1f}",
            f"{p.peak / found[0].peak:.2f}",
        ]
        for p in found
    ]
    table = Table(
        f"Peak memory beside the weights (MB), one context of {context:,} tokens, {dtype}",
        ["kv_bits", "peak", "KV cache", "of plain"],
        rows,
        f"{layers} layers, one KV head of 64. Only the last {CHUNK} prompt tokens are computed.",
    )
    data = {"context": context, "layers": layers, "dtype": dtype}
    return Report("peak", [table], {**data, "formats": [asdict(peak) for peak in found]})
