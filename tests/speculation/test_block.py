"""DFlash drafts: proposals equal the published definition's, and answers those without a draft."""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, config, prompt, tiny_model
from models.dense_kv import DenseCache
from models.tiny import arrays_in, tiny_config
from speculation.head_checkpoints import dflash_checkpoint, write
from speculation.head_names import ASSISTANT, ASSISTANT_MODEL, BLOCK, assistant_tensors, head_inputs
from speculation.test_predictors import check_answers, rms

from mlxinfer.core import SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.proposals import Proposal
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.layers.step import Step, Taps
from mlxinfer.models.decoder import Model
from mlxinfer.models.dflash import load_dflash
from mlxinfer.speculation.block import BlockProposer
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.options import kind_of
from mlxinfer.speculation.speculation import Speculation

CASE = "qwen3-v5"
TAPS = [0, 2]
HEADS = Path(__file__).parents[1] / "data" / "heads"
GREEDY = SamplingParams(max_tokens=16)


def model() -> Model:
    return tiny_model(CASE, quantized=True)


class Recording(BlockProposer):
    """Keeps what was proposed, and for which tokens."""

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        proposed = super().propose(sequences, depths)
        self.seen = getattr(self, "seen", [])
        self.seen += [
            (list(s.token_ids), ids) for s, (ids, _) in zip(sequences, proposed, strict=True)
        ]
        return proposed


def with_block(
    folder: Path, *, budget: int = 1 << 26, **changes: object
) -> tuple[Speculation, Recording]:
    draft = load_dflash(dflash_checkpoint(folder, tiny_config(CASE), taps=TAPS, **changes), model())
    source = Recording(draft, config(kv_budget_bytes=budget), vocab_size=96, cost=0.1)
    return Speculation([source], FixedDepth(5), max_depth=5), source


def reference(folder: Path, ids: Seq[int], count: int, *, window: int, causal: bool) -> list[int]:
    """Tokens after `ids`, written out as in z-lab/dflash: all positions at once, no cache."""
    tensors = arrays_in(folder)
    cache, taps = DenseCache(model()), Taps(TAPS)  # type: ignore[no-untyped-call]
    before = len(ids) - 1
    caches = cache.step([("a", before)])  # type: ignore[no-untyped-call]
    model()(mx.array(ids[:before]), Step(mx.arange(before), caches, taps=taps))
    hidden = rms(taps.joined() @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    x = model().embed(mx.array([ids[-1], *[2] * count]))
    for index in range(2):
        x = reference_layer(
            {n.removeprefix(f"layers.{index}."): a for n, a in tensors.items()},
            x,
            hidden,
            window=None if index == 0 else window,
            causal=causal and index == 1,
        )
    logits = model().logits(rms(x, tensors["norm.weight"]))[1:]
    result: Any = mx.argmax(logits, axis=-1).tolist()
    return list(result)


def reference_layer(
    weight: dict[str, mx.array], x: mx.array, hidden: mx.array, *, window: int | None, causal: bool
) -> mx.array:
    normed, past, length = rms(x, weight["input_layernorm.weight"]), len(hidden), len(x)

    def heads(rows: mx.array, name: str, start: int) -> mx.array:
        projected = (rows @ weight[f"self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, 16)
        if name != "v":
            projected = rms(projected, weight[f"self_attn.{name}_norm.weight"])
        projected = projected.transpose(1, 0, 2)[None]
        if name == "v":
            return projected
        return mx.fast.rope(projected, 16, traditional=False, base=1000.0, scale=1.0, offset=start)

    q = heads(normed, "q", past)
    k, v = (
        mx.concatenate([heads(hidden, n, 0), heads(normed, n, past)], axis=2) for n in ("k", "v")
    )
    query, key = past + mx.arange(length)[:, None], mx.arange(past + length)[None]
    mask = key >= 0
    if window is not None:
        mask = ((key < past) & (query - key < window)) | (key >= past)
    if causal:
        mask = mask & (key <= query)
    y = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)[0]
    x = x + y.transpose(1, 0, 2).flatten(1) @ weight["self_attn.o_proj.weight"].T
    inner = rms(x, weight["post_attention_layernorm.weight"])
    gate, up = (inner @ weight[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (gate * mx.sigmoid(gate) * up) @ weight["mlp.down_proj.weight"].T


@pytest.mark.alike
@pytest.mark.parametrize("causal", [None, False])
def test_proposals_are_those_of_the_definition(causal: bool | None, tmp_path: Path) -> None:
    """In any batch, over prompts in chunks and steps of several tokens."""
    stated = {} if causal is None else {"is_causal": causal}
    speculation, source = with_block(tmp_path, **stated)
    harness = Harness(model(), proposer=speculation)
    for i in range(3):
        harness.add(str(i), prompt(20 + 50 * i, i), GREEDY)
    harness.drain()
    tried = [(ids, actual) for ids, actual in source.seen if actual]
    assert len(tried) > 20
    wrong = 0
    for ids, actual in tried[:: max(len(tried) // 12, 1)]:
        expected = reference(tmp_path, ids, len(actual), window=24, causal=causal is None)
        wrong += actual != expected
    assert wrong == 0


def test_answers_are_those_without_a_draft(tmp_path: Path) -> None:
    """A long prompt, a preemption, a prefix that only the model knows, little room."""
    speculation, source = with_block(tmp_path, budget=1 << 19)
    harness = Harness(model(), proposer=speculation, max_batch=4)
    check_answers(harness)
    assert speculation.stats()["drafted"] > 40
    assert not source._held
    assert not source._contexts


def test_muse_glimmers_assistant_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """Within its window: transformers 5.24 has none over a prompt's context."""
    folder = write(tmp_path, ASSISTANT, assistant_tensors(), None)
    assert kind_of(folder) == "dflash"
    whole = tiny_model(ASSISTANT_MODEL)
    draft = load_dflash(folder, whole)
    ids, hidden = head_inputs({"hidden_size": 128, "vocab_size": 96})
    context = draft.context(mx.array(hidden), 0)
    x = whole.embed(mx.array([int(ids[-1]), *[draft.mask_token_id] * (BLOCK - 1)]))
    for layer, known in zip(draft.layers, context, strict=True):
        x = layer(x, mx.arange(len(ids), len(ids) + BLOCK), [known])
    logits = np.load(HEADS / "muse_glimmer_assistant.npz")["logits"]
    assert np.abs(np.array(whole.logits(draft.norm(x))) - logits).max() < 1e-4 * logits.std()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (
            {"dflash_config": {"target_layer_ids": [9], "mask_token_id": 2}},
            CheckpointError,
            "layers",
        ),
        (
            {"dflash_config": {"selector_rank": 8, "target_layer_ids": [0]}},
            UnsupportedModelError,
            "DFlash 2",
        ),
    ],
)
def test_drafts_that_do_not_fit_are_refused_by_name(
    changes: dict[str, object], error: type[Exception], named: str, tmp_path: Path
) -> None:
    folder = dflash_checkpoint(tmp_path, tiny_config(CASE), taps=TAPS, **changes)
    with pytest.raises(error, match=named):
        load_dflash(folder, model())
