"""MTP modules and EAGLE-3 heads: parity with public definitions, exact answers, right proposals."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, config, prompt, tiny_model
from engine.pictures import picture, placed, with_tower
from models import tiny
from models.dense_kv import DenseCache
from models.runs import every
from models.tiny import arrays_in, config_of, tiny_config
from speculation.head_checkpoints import eagle_checkpoint, mtp_checkpoint, write
from speculation.head_names import MTP_CASES, QWEN_CASES, REFERENCE_CASES, head_inputs

from mlxinfer.bench.peer import load_peer_model
from mlxinfer.core import SamplingParams
from mlxinfer.errors import InvalidRequestError
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from mlxinfer.models.eagle import load_eagle
from mlxinfer.models.mtp import load_mtp
from mlxinfer.models.predictor import Predictor
from mlxinfer.speculation.controller import FixedDepth
from mlxinfer.speculation.options import SpeculationOptions
from mlxinfer.speculation.predictor import FOLLOW_AT, PredictorProposer
from mlxinfer.speculation.sources import load_draft
from mlxinfer.speculation.speculation import Speculation

GREEDY = SamplingParams(max_tokens=16)
DRAWN = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=11)
PACKED = {"group_size": 32, "bits": 4}
REFERENCES = Path(__file__).parents[1] / "data" / "heads"


@cache
def with_head(case: str, *, right: bool, packed: bool = True) -> tuple[Model, Predictor]:
    folder = Path(mkdtemp())
    mtp_checkpoint(folder, case, right=right, how=PACKED if packed else None)
    model = load(folder)
    return model, load_mtp(folder, model)


@cache
def with_eagle(drafted: int = 64) -> tuple[Model, Predictor]:
    model = tiny_model("qwen3-v4", quantized=True)
    folder = eagle_checkpoint(
        Path(mkdtemp()), tiny_config("qwen3-v4"), drafted=drafted, max_position_embeddings=4096
    )
    return model, load_eagle(folder, model)


def check_answers(harness: Harness, forget: Callable[[], None] = lambda: None) -> None:
    """To long and short prompts, one of them preempted, and to one whose prefix is cached.

    Args:
        forget: what a draft knows of that prefix.
    """
    prompts = [prompt(9, 1), prompt(FOLLOW_AT + 90, 2), prompt(70, 3), prompt(40, 4)]
    for i, ids in enumerate(prompts):
        harness.add(str(i), ids, GREEDY)
        harness.turn(2)
    harness.loop.scheduler.queues.preempt(harness.loop.scheduler.queues.running[-1])
    harness.drain()
    forget()
    assert harness.run("4", prompts[1] + prompts[0], GREEDY).cached_tokens > 0
    harness.check()


def speculation_of(
    model: Model, head: Predictor, depth: int = 4, **sizes: object
) -> tuple[Speculation, PredictorProposer]:
    sizes = {"num_pages": 400, **sizes}
    source = PredictorProposer(
        head, config(**sizes), name="mtp", vocab_size=model.config.vocab_size, cost=0.1
    )
    return Speculation([source], FixedDepth(depth), max_depth=depth), source


@pytest.mark.alike
@pytest.mark.parametrize("case", every(3, MTP_CASES))
def test_a_head_that_computes_what_the_model_will_is_always_right(case: str) -> None:
    """Greedy and drawn: both draw with the same random numbers."""
    model, head = with_head(case, right=True)
    speculation, _ = speculation_of(model, head)
    harness = Harness(model, proposer=speculation)
    rows = [(prompt(12, 0), GREEDY), (prompt(72, 1), DRAWN), (prompt(40, 2), GREEDY)]
    for i, (ids, params) in enumerate(rows):
        harness.add(str(i), ids, params)
    harness.check()
    stats = speculation.stats()
    assert stats["drafted"] == stats["accepted"] > 0


@pytest.mark.alike
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(f"{kind}-v4", marks=pytest.mark.slow) for kind in ("qwen3_5_text", "hy_v3")),
        *every(4, ("glm4_moe_lite-v4", "exaone_moe-v4", "bailing_hybrid-v4", "glm_moe_dsa-shared")),
        *every(2, ("eagle", "qwen4_exp_text-v4")),
    ],
)
def test_answers_are_those_without_a_head(case: str) -> None:
    """Long and short prompts, a preemption, a prefix that only the model knows, little room."""
    model, head = with_eagle() if case == "eagle" else with_head(case, right=False)
    speculation, source = speculation_of(model, head, 3, num_pages=60, max_batch=3)
    harness = Harness(model, proposer=speculation, max_batch=4)
    check_answers(harness, forget=source._start_afresh)
    assert speculation.stats()["drafted"] > 40
    assert not source._held
    assert not source._follows


def test_a_head_follows_long_prompts_and_steps_without_proposals_in_pages() -> None:
    """So few hidden states are kept, and none twice."""
    model, head = with_head("qwen3_5_text-v4", right=True)
    speculation, source = speculation_of(model, head)
    harness = Harness(model, proposer=speculation)
    harness.add("a", prompt(3 * FOLLOW_AT), GREEDY)
    most = 0
    while not harness.loop.idle:
        harness.turn()
        most = max([most, *(len(held.rows) for held in source._held.values())])
    assert most <= FOLLOW_AT + 64 + 16  # a chunk more, and what fills no page
    assert speculation.stats()["accepted"] == speculation.stats()["drafted"] > 0


def test_prompts_are_prefix_cached_in_the_head_too() -> None:
    model, head = with_head("qwen3_5_text-v4", right=True)
    speculation, source = speculation_of(model, head)
    harness = Harness(model, proposer=speculation)
    for name in "ab":
        harness.run(name, prompt(100), GREEDY)
    prefix = source._parts.scheduler.kv_manager.prefix
    assert prefix.tokens_reused >= 80
    assert speculation.stats()["accepted"] == speculation.stats()["drafted"]


def test_a_head_shares_nothing_between_pictures() -> None:
    """Its keys come from hidden states of the model, which saw another picture."""
    model, head = with_head("qwen3_5_text-v4", right=False)
    model = with_tower(model)
    speculation, source = speculation_of(model, head)
    harness = Harness(model, proposer=speculation)
    prefix = source._parts.scheduler.kv_manager.prefix
    reused = []
    for name, seed in enumerate((1, 2, 1)):
        ids, pictures = placed(prompt(40), picture(seed, 4, 4), prompt(60))
        harness.run(str(name), ids, GREEDY, pictures=pictures)
        reused.append(prefix.tokens_reused)
    harness.check()
    assert reused[:2] == [0, 0]
    assert reused[2] >= 80
    assert speculation.stats()["drafted"] > 0


def test_rejection_sampling_accepts_what_a_right_head_draws() -> None:
    """Greedy answers stay as they are; drawn ones take every proposal, since both draw alike."""
    model, head = with_head("qwen3_5_text-v4", right=True)
    vocab_size = model.config.vocab_size
    source = PredictorProposer(
        head, config(num_pages=400), name="mtp", vocab_size=vocab_size, cost=0.1, rejects=True
    )
    speculation = Speculation([source], FixedDepth(4), max_depth=4)
    harness = Harness(model, proposer=speculation)
    harness.add("greedy", prompt(30), GREEDY)
    harness.add("drawn", prompt(40, 1), DRAWN)
    harness.check("greedy")
    stats = speculation.stats()
    assert stats["accepted"] >= 0.95 * stats["drafted"] > 0


# -- parity -------------------------------------------------------------------------------------


def run_head(head: Predictor, ids: Seq[int], hidden: np.ndarray, cuts: Seq[int]) -> np.ndarray:
    """Logits (T, V) of a head over a sequence, computed in parts."""
    cache, parts = DenseCache(head), []  # type: ignore[no-untyped-call]
    for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        head.feed(head.enter(mx.array(hidden[start:stop])))
        parts.append(cache.run(head, [("a", list(ids[start:stop]))]))  # type: ignore[no-untyped-call]
    return np.array(mx.concatenate(parts).astype(mx.float32))


def assert_close(ours: np.ndarray, reference: mx.array) -> None:
    wanted = np.array(reference.astype(mx.float32))
    assert np.abs(ours - wanted).max() <= 1e-4 * max(1.0, float(wanted.std()))


def rms(x: mx.array, weight: mx.array, eps: float = 1e-6) -> mx.array:
    return x / mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


@pytest.mark.alike
@pytest.mark.parametrize("case", REFERENCE_CASES)
def test_an_mtp_head_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    """In several parts, with names as published."""
    folder = mtp_checkpoint(tmp_path, case)
    reference = np.load(REFERENCES / f"{case}.npz")["logits"]
    assert_close(of_head(folder), mx.array(reference))


def test_the_head_of_a_text_inside_of_another_model_is_that_of_the_text(tmp_path: Path) -> None:
    """Kimi K2.5 has the text of DeepSeek V3."""
    alone = mtp_checkpoint(tmp_path / "alone", "deepseek_v3-v4")
    inside = {f"language_model.{name}": array for name, array in arrays_in(alone).items()}
    text = config_of(alone)
    whole = {"model_type": "kimi_k25", "text_config": text, "hidden_size": 64, "vocab_size": 96}
    folder = tiny.write(tmp_path / "whole", whole, inside)
    assert_close(of_head(folder), mx.array(np.load(REFERENCES / "deepseek_v3-v4.npz")["logits"]))


def test_the_head_of_xing_is_that_of_deepseek_v3(tmp_path: Path) -> None:
    """It has no connections, and reads what the last norm gives of all streams."""
    folder = mtp_checkpoint(tmp_path / "xing", "xing4_0-v4")
    config = {**config_of(folder), "model_type": "deepseek_v3"}
    plain = {name: array for name, array in arrays_in(folder).items() if "_hc." not in name}
    assert_close(of_head(folder), mx.array(of_head(tiny.write(tmp_path / "v3", config, plain))))


def test_of_several_heads_the_first_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = mtp_checkpoint(tmp_path / "one", "mimo_v2_flash-v4")
    arrays = arrays_in(one)
    front = "model.mtp.layers."
    more = {
        name.replace(f"{front}0.", f"{front}{index}."): array + 1
        for name, array in arrays.items()
        for index in (1, 2)
        if name.startswith(front)
    }
    three = tiny.write(tmp_path / "three", config_of(one), arrays | more)
    wanted = of_head(one)
    assert not caplog.records
    assert np.array_equal(of_head(three), wanted)
    assert "3 heads that predict tokens further ahead; the first is read" in caplog.text


@pytest.mark.parametrize("case", ["olmo_hybrid-v4", "kimi_linear-v4", "llama-v4"])
def test_a_head_without_a_known_definition_is_left_out_and_loading_says_so(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(case)
    more = {"mtp.fc.weight": mx.zeros((8, 16)), "model.mtp.layers.0.enorm.weight": mx.zeros((8,))}
    model = load(tiny.write(tmp_path, config, tiny.arrays_of(config) | more))
    assert "a head that predicts tokens further ahead, not read here" in caplog.text
    with pytest.raises(InvalidRequestError, match="is not read here"):
        load_mtp(tmp_path, model)


@pytest.mark.parametrize("case", QWEN_CASES)
def test_an_mtp_head_gives_the_logits_of_its_definition(case: str, tmp_path: Path) -> None:
    """The projection as in vLLM; the layer in it is mlx-lm's own."""
    folder = mtp_checkpoint(tmp_path, case)
    assert_close(of_head(folder), reference_mtp(folder))


def of_head(folder: Path) -> np.ndarray:
    """Logits (T, V) of the head in a folder."""
    model = load(folder)
    ids, hidden = head_inputs(config_of(folder))
    return run_head(load_mtp(folder, model), ids.tolist(), hidden, [13, 14])


def reference_mtp(folder: Path) -> mx.array:
    """Logits (T, V)."""
    stated = config_of(folder)
    tensors = arrays_in(folder)
    eps, names = stated["rms_norm_eps"], ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    embedding_norm, hidden_norm, last_norm = (tensors[f"mtp.{n}.weight"] + 1.0 for n in names)
    ids, hidden = (mx.array(input) for input in head_inputs(stated))
    embedded = tensors["model.embed_tokens.weight"][ids]
    both = mx.concatenate([rms(embedded, embedding_norm, eps), rms(hidden, hidden_norm, eps)], -1)
    x = both @ tensors["mtp.fc.weight"].T
    mask = mx.tril(mx.ones((len(ids), len(ids)), mx.bool_))
    x = rms(layer_of_mlx_lm(folder)(x[None], mask=mask)[0], last_norm, eps)
    tied = stated["tie_word_embeddings"]
    return x @ tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def layer_of_mlx_lm(folder: Path) -> Any:
    """mlx-lm's decoder layer with the head's weights, in place of one that is like it."""
    stated = config_of(folder)
    tensors = arrays_in(folder)
    index = max(
        int(n.split(".")[2]) for n in tensors if n.startswith("model.layers.") and "o_proj" in n
    )
    kept = {n: a for n, a in tensors.items() if not n.startswith("mtp.")}
    for name, array in tensors.items():
        if name.startswith("mtp.layers.0."):
            kept[name.replace("mtp.layers.0.", f"model.layers.{index}.")] = array
    kind = stated["model_type"].removesuffix("_text")
    if kind != stated["model_type"]:
        rope = {name: stated[name] for name in ("rope_theta", "partial_rotary_factor")}
        stated = {**stated, "rope_parameters": {"type": "default", **rope}}
        stated = {"model_type": kind, "text_config": stated}
    where = write(folder / "reference", stated, {n: np.array(a) for n, a in kept.items()}, None)
    model = load_peer_model(where)
    return getattr(model, "language_model", model).model.layers[index]


@pytest.mark.parametrize("normed", [False, True])
def test_an_eagle_head_gives_the_logits_of_its_definition(normed: bool, tmp_path: Path) -> None:
    """Written out in plain operations, as in vLLM's llama_eagle3.py."""
    stated = tiny_config("qwen3-v4")
    folder = eagle_checkpoint(tmp_path, stated, drafted=60, norm_before_residual=normed)
    model = tiny_model("qwen3-v4")
    head = load_eagle(folder, model)
    assert head.taps == (1, stated["num_hidden_layers"] // 2 - 1, 0)
    ids = prompt(21, vocab=stated["vocab_size"])
    hidden = np.random.default_rng(0).standard_normal((21, 3 * stated["hidden_size"]))
    ours = run_head(head, ids, hidden.astype(np.float32), [13, 14])
    tensors = arrays_in(folder)
    token_ids = mx.arange(60) + tensors["d2t"].astype(mx.int32)
    embedded = model.embed(mx.array(ids))
    reference = reference_eagle(tensors, embedded, mx.array(hidden.astype(np.float32)), normed)
    assert_close(ours[:, np.array(token_ids)], reference)
    assert np.isneginf(np.delete(ours, np.array(token_ids), axis=1)).all()


def reference_eagle(
    tensors: dict[str, mx.array], embedded: mx.array, tapped: mx.array, normed: bool
) -> mx.array:
    """Logits (T, drafted)."""
    weight = {n.removeprefix("midlayer.").removesuffix(".weight"): a for n, a in tensors.items()}
    hidden = tapped @ weight["fc"].T
    right = rms(hidden, weight["hidden_norm"], 1e-6)
    both = mx.concatenate([rms(embedded, weight["input_layernorm"], 1e-6), right], axis=-1)
    q, k, v = (
        (both @ weight[f"self_attn.{n}_proj"].T).reshape(len(both), -1, 16).transpose(1, 0, 2)
        for n in "qkv"
    )
    q, k = (
        mx.fast.rope(x[None], 16, traditional=False, base=1000.0, scale=1.0, offset=0)
        for x in (q, k)
    )
    attended = mx.fast.scaled_dot_product_attention(q, k, v[None], scale=0.25, mask="causal")[0]
    attended = attended.transpose(1, 0, 2).flatten(1) @ weight["self_attn.o_proj"].T
    x = attended + (right if normed else hidden)
    inner = rms(x, weight["post_attention_layernorm"], 1e-6)
    gate, up = (inner @ weight[f"mlp.{n}_proj"].T for n in ("gate", "up"))
    x = x + (gate * mx.sigmoid(gate) * up) @ weight["mlp.down_proj"].T
    return rms(x, weight["norm"], 1e-6) @ weight["lm_head"].T


@pytest.mark.parametrize("case", ["gemma3n_text-v4", "qwen4_exp_text-v4", "glm5_next_text-v4"])
def test_a_model_with_several_hidden_states_a_token_takes_no_head(case: str) -> None:
    folder = eagle_checkpoint(Path(mkdtemp()), tiny_config("qwen3-v4"), drafted=40)
    with pytest.raises(InvalidRequestError, match="several streams"):
        load_draft(
            SpeculationOptions(method="eagle", draft=folder), folder, tiny_model(case), dtype="auto"
        )
