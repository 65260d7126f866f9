"""Whether a model fits follows from sizes alone, and agrees with what the cache would take."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models.cases import CASES
from models.picture_cases import QWEN_CASES, picture_tensors
from models.published import PUBLISHED
from models.tiny import tiny_checkpoint, write
from speculation.head_checkpoints import mtp_checkpoint
from speculation.head_names import MTP_CASES

from benchmarks.checkpoints import Experts, write_checkpoint
from mlxinfer import LLM, InsufficientMemoryError, hub
from mlxinfer.cache.layout import lay_out
from mlxinfer.cache_specs import StateSpec
from mlxinfer.config import KVOptions
from mlxinfer.convert.recipes import floor_bits
from mlxinfer.memory import MODELS_SHARE, human_bytes, models_limit_bytes
from mlxinfer.memory.fit import (
    ENOUGH_CONTEXT,
    RANKS,
    TABLE_BITS,
    FitVerdict,
    fit_of,
    held_bytes,
    kv_bytes,
    longest_context,
    require_fit,
)
from mlxinfer.memory.roofline import CHIPS, Machine, Work, estimate
from mlxinfer.models import load, load_any_config
from mlxinfer.models.config import ModelConfig, load_config, normalise
from mlxinfer.models.mtp import load_mtp
from mlxinfer.models.weights.files import expert_bytes, read_headers
from tests.seeds import seeded

LLAMA = {
    **{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "eos_token_id": 2},
}
SPARSE = Experts(
    **{"hidden": 64, "inner": 64, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 64},
    **{"vocab": 64, "experts": 8, "chosen": 2},
)
WEIGHTS = 1_000_000


def config(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return load_config(folder)


def test_a_conversion_leaves_what_sees_pictures_as_it_is(tmp_path: Path) -> None:
    tensors = picture_tensors("qwen3_vl")
    folder = write(tmp_path, QWEN_CASES["qwen3_vl"].config, tensors)
    model, weights = load_config(folder), sum(value.nbytes for value in tensors.values())
    seeing = sum(value.nbytes for name, value in tensors.items() if "visual." in name)
    fit = fit_of(model, weights, weights, folder=folder, context=64)
    text = fit_of(model, weights - seeing, weights - seeing, context=64)
    assert fit.verdict is text.verdict is FitVerdict.TOO_LARGE
    assert fit.converted_bits == text.converted_bits
    assert fit.converted_bytes == text.converted_bytes + seeing


def test_the_longest_context_fits_and_one_token_more_does_not(tmp_path: Path) -> None:
    rng = seeded()
    model = config(tmp_path)
    for _ in range(50):
        bits, limit = rng.choice((16, 8, 4)), rng.randrange(WEIGHTS, 12 * WEIGHTS)
        longest = longest_context(model, WEIGHTS, limit, bits)
        assert WEIGHTS + kv_bytes(model, longest, bits) <= limit
        more = WEIGHTS + kv_bytes(model, longest + 1, bits)
        assert longest == model.max_context or more > limit


def test_verdicts_follow_from_the_context_that_is_left(tmp_path: Path) -> None:
    for limit, verdict in (
        (20_000_000, FitVerdict.FITS),
        (4_000_000, FitVerdict.SHORT),
        (1_500_000, FitVerdict.TOO_LARGE),
        (900_000, FitVerdict.TOO_LARGE),
    ):
        fit = fit_of(config(tmp_path), WEIGHTS, limit)
        assert fit.verdict is verdict
        assert fit.as_dict()["text"] == fit.text
        assert fit.contexts[8] >= fit.contexts[16]


def test_a_model_that_is_too_large_says_what_would_fit(tmp_path: Path) -> None:
    """The proposals are true: as converted, as shortened, as shared."""
    rng = seeded()
    refused = pipelined = 0
    for _ in range(200):
        quantised = rng.choice([{}, {"quantization": {"bits": 4, "group_size": 64}}])
        model = config(tmp_path, num_hidden_layers=rng.choice([2, 12]), **quantised)
        weights, limit = rng.randrange(WEIGHTS, 40 * WEIGHTS), rng.randrange(10**5, 30 * WEIGHTS)
        fit = fit_of(model, weights, limit, folder=tmp_path)
        needed, needed_8 = (kv_bytes(model, ENOUGH_CONTEXT, bits) for bits in (16, 8))
        if fit.verdict is not FitVerdict.TOO_LARGE:
            assert (fit.converted_bits, fit.ranks) == (None, None)
            continue
        refused += 1
        stored = 4.5 if quantised else 16
        num_weights = weights * 8 / stored
        tables = (2 - model.tie_word_embeddings) * model.vocab_size * model.hidden_size
        fitting = [
            bits
            for bits in (8, 6, 5, 4, 3, 2)
            if bits < stored
            and int(num_weights * (bits + 0.5) / 8 + tables * max(4 - bits, 0) / 8) + needed_8
            <= limit
        ]
        assert fit.converted_bits == max(fitting, default=None)
        shareable = () if quantised else (2, 4)  # 4 KV heads; one group of columns
        whole, layers = weights + needed, model.num_layers
        parts = [n for n in shareable if 1.1 * whole / n <= limit]
        stages = [n for n in RANKS if n <= layers and whole / n + whole / layers <= limit]
        sharing = parts + stages
        assert fit.ranks == min(sharing, default=None)
        pipelined += fit.pipeline
        assert fit.pipeline == (bool(sharing) and min(sharing) not in parts)
        assert ("--pipeline" in fit.text) == fit.pipeline
        text = fit.text
        assert f"{fit.needed_context:,} tokens" in text
        assert (f"--bits {fit.converted_bits}," in text) == bool(fitting)
        assert (f"--ranks {fit.ranks}" in text) == bool(sharing)
        for bits, longest in fit.contexts.items():
            assert (f"{longest:,} at {bits} bits" in text) == (longest > 0)
    assert refused > 20
    assert pipelined


def test_tables_are_counted_with_the_bits_that_a_conversion_gives_them() -> None:
    assert floor_bits("model.embed_tokens") == floor_bits("lm_head") == TABLE_BITS


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], int]:
    """Give this machine so many bytes of memory; returns what models may take of it."""

    def set_to(num_bytes: float) -> int:
        for place in ("memory", "session.engine_factory", "session.options"):
            monkeypatch.setattr(f"mlxinfer.{place}.total_memory_bytes", lambda: int(num_bytes))
        return models_limit_bytes()

    return set_to


def weights_of_demo() -> int:
    return sum(file.stat().st_size for file in hub.resolve("demo").glob("*.safetensors"))


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    memory: Callable[[float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kv_bytes(load_any_config(hub.resolve("demo")), 2048, 8)
    limit = memory((0.7 * weights_of_demo() + kept) / MODELS_SHARE)
    monkeypatch.setattr("mlxinfer.models.load", None)
    with pytest.raises(InsufficientMemoryError) as caught:
        LLM("demo")
    shown = human_bytes(weights_of_demo()), human_bytes(limit)
    for part in ("demo does not fit", *shown, "What would fit", "--bits"):
        assert part in str(caught.value)


def test_a_model_is_refused_where_show_says_it_does_not_fit(memory: Callable[[float], int]) -> None:
    folder, weights = hub.resolve("demo"), weights_of_demo()
    rng, seen = seeded(), set()
    for _ in range(40):
        num_bytes = int(weights * rng.uniform(0.8, 4))
        limit, mac = memory(num_bytes), Machine("M4", CHIPS["M4"], num_bytes)
        on = estimate(load_any_config(folder), weights, Work(1, 1), mac, 512, folder=folder)["fit"]
        fit = fit_of(load_any_config(folder), weights, limit, folder=folder)
        assert on["limit_bytes"] == limit
        assert on["text"] == fit.text
        seen.add(on["verdict"])
        if on["verdict"] != FitVerdict.TOO_LARGE:
            require_fit("demo", folder, weights_bytes=weights)
            continue
        with pytest.raises(InsufficientMemoryError) as caught:
            require_fit("demo", folder, weights_bytes=weights)
        assert str(caught.value).removeprefix("demo does") in on["text"]
    assert len(seen) > 1


def test_experts_could_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have what the rest and its KV cache leave, if a token's experts have room in it."""
    folder = write_checkpoint(tmp_path, SPARSE)
    assert held_bytes(folder) - held_bytes(folder, 1000) == expert_bytes(folder) - 1000
    monkeypatch.setattr("mlxinfer.memory.fit.expert_bytes", lambda folder: 10 * 10**9)
    model, rest = load_config(folder), 10**9
    for left, expected in ((5.55e9, 5_500_000_000), (2.45e9, None), (-1e9, None)):
        limit = int(rest + kv_bytes(model, ENOUGH_CONTEXT) + left)
        actual = fit_of(model, rest + 10 * 10**9, limit, folder=folder)
        assert actual.expert_memory == expected
        assert ("--expert-memory 5.5GB" in actual.text) == (expected is not None)


def test_too_much_expert_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposals follow from the files, not from the part of them that was to be in memory."""
    folder, rest, experts = write_checkpoint(tmp_path, SPARSE), 10 * 10**9, 200 * 10**9

    def held(folder: Path, expert_memory: int | None = None) -> int:
        return rest + (experts if expert_memory is None else expert_memory)

    monkeypatch.setattr("mlxinfer.memory.fit.held_bytes", held)
    monkeypatch.setattr("mlxinfer.memory.fit.expert_bytes", lambda folder: experts)
    for expert_memory in (80 * 10**9, None):
        weights = held(folder, expert_memory)
        with pytest.raises(InsufficientMemoryError) as caught:
            require_fit("m", folder, weights_bytes=weights, limit_bytes=64 * 10**9)
        assert f"{human_bytes(weights)} of weights and" in str(caught.value)
        assert "--expert-memory 53.9GB" in str(caught.value)
        assert "--bits 4, about 59.1 GB" in str(caught.value)
    require_fit("m", folder, weights_bytes=held(folder, 53_900_000_000), limit_bytes=64 * 10**9)


@pytest.mark.parametrize(
    "case", ["step3p5-v4", "granitemoehybrid-v4", "mimo_v2_flash-v4", "gpt_oss-v4", "laguna-v5"]
)
def test_experts_are_known_by_the_names_that_families_publish(tmp_path: Path, case: str) -> None:
    """They are most of a mixture; its router is not one of them."""
    folder = tiny_checkpoint(tmp_path, case)
    headers = [tensor for tensors in read_headers(folder).values() for tensor in tensors.items()]
    stacks = [info for name, info in headers if len(info.shape) == 3 and "conv" not in name]
    ones = [info for name, info in headers if re.search(r"experts\.\d+\.", name)]
    whole = sum(info.end - info.start for info in [*stacks, *ones])
    assert whole <= expert_bytes(folder) <= 1.02 * whole


def test_the_same_weights_in_another_layout_count_once(tmp_path: Path) -> None:
    """As downloads of some repositories have them; only the first are loaded."""
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))
    assert held_bytes(tmp_path) == 1000
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(600))
    assert held_bytes(tmp_path) == 1200


def test_what_the_user_states_counts(memory: Callable[[float], int]) -> None:
    """A shorter context, fewer bits of KV cache, or a budget of its own for it."""
    folder, weights = hub.resolve("demo"), weights_of_demo()
    model = load_any_config(folder)
    memory((weights + kv_bytes(model, 1024, 8)) / MODELS_SHARE + 100)
    with pytest.raises(InsufficientMemoryError):
        require_fit("demo", folder, weights_bytes=weights)
    require_fit("demo", folder, weights_bytes=weights, context=1000)
    require_fit("demo", folder, weights_bytes=weights, kv=KVOptions(bits=(4, 4)), context=1500)
    with pytest.raises(InsufficientMemoryError):
        require_fit("demo", folder, weights_bytes=weights, kv=KVOptions(bits=(8, 8)), context=1500)
    require_fit("demo", folder, weights_bytes=weights, kv=KVOptions(window=500, sinks=4))
    with pytest.raises(InsufficientMemoryError):
        require_fit("demo", folder, weights_bytes=weights, kv=KVOptions(window=1800, sinks=4))
    with pytest.raises(InsufficientMemoryError):
        LLM("demo")
    with LLM("demo", max_memory="3MB") as llm:  # of all the memory there is
        assert llm.stats()["running"] == 0


def test_index_keys_count_as_they_are_stored() -> None:
    """A cache of fewer bits leaves those of DeepSeek V3.2 in 16."""
    model = normalise(PUBLISHED["DeepSeek-V3.2"].config)
    specs = [model.cache_spec(i) for i in range(model.num_layers)]
    for bits in (16, 8, 4):
        stored = (None, None) if bits == 16 else (bits, bits)
        layers = lay_out(specs, KVOptions(bits=stored), dtype=mx.bfloat16, key_bias=False)
        assert kv_bytes(model, 1000, bits) == 1000 * sum(layer.token_bytes for layer in layers)


def test_windows_make_long_contexts_cheap(tmp_path: Path) -> None:
    plain = config(tmp_path)
    window = config(tmp_path, model_type="mistral", sliding_window=256)
    assert kv_bytes(window, 8192) == kv_bytes(plain, 256)
    assert fit_of(window, WEIGHTS, 2 * WEIGHTS).verdict is FitVerdict.FITS


def test_sizes_are_those_of_loaded_models_and_of_their_caches(tmp_path: Path) -> None:
    """Of families that are drawn, and of those whose layers keep an index."""
    indexed = [f"{name}-v4" for name in ("qwen4_exp_text", "glm5_next_text", "minimax_m3_vl_text")]
    for case in {*seeded().sample([*CASES], 12), *indexed}:
        folder = tiny_checkpoint(tmp_path / case, case)
        model = load(folder)
        # Latent attention also holds a projection turned round: little, at full size.
        assert 0.999 <= model.num_bytes / (held_bytes(folder) - header_bytes(folder)) <= 1.07, case
        paged = [spec for spec in model.cache_specs if not isinstance(spec, StateSpec)]
        for context in (5, 64, 300):
            kept = sum(2 * spec.numbers * min(context, spec.window or context) for spec in paged)
            assert kv_bytes(model.config, context) == kept, case


def test_heads_count_where_speculation_loads_them(tmp_path: Path) -> None:
    for case in seeded().sample(MTP_CASES, 4):
        folder = mtp_checkpoint(tmp_path / case, case)
        model, header = load(folder), header_bytes(folder)
        with_head = model.num_bytes + load_mtp(folder, model).num_bytes
        # A head may bring tables of its own, which are left out.
        assert 0.999 <= model.num_bytes / (held_bytes(folder) - header) <= 1.07, case
        assert 0.95 <= with_head / (held_bytes(folder, head=True) - header) <= 1.07, case


@pytest.mark.parametrize(
    ("case", "read"), [("exaone_moe-v5", 1), ("deepseek_v4-v5", 0), ("qwen3_next-v5", 1)]
)
def test_of_several_heads_the_first_is_loaded_at_most(tmp_path: Path, case: str, read: int) -> None:
    folder = tiny_checkpoint(tmp_path, case)
    whole, count = held_bytes(folder), load_config(folder).num_layers
    heads = {f"model.layers.{count + i}.eh_proj.weight": mx.zeros((64, 100 + i)) for i in range(3)}
    mx.save_safetensors(str(folder / "model-heads.safetensors"), heads)
    (folder / "model.safetensors").rename(folder / "model-one.safetensors")
    sizes = [value.nbytes for value in heads.values()]
    header = (folder / "model-heads.safetensors").stat().st_size - sum(sizes)
    assert held_bytes(folder) - whole == header
    assert held_bytes(folder, head=True) - whole == sum(sizes[:read]) + header


def test_senses_that_are_not_read_take_no_memory(tmp_path: Path) -> None:
    """That of Qwen3-VL is read, and that of a LLaVA around an unknown one is not."""
    text = json.loads((tiny_checkpoint(tmp_path / "text", "llama-v4") / "config.json").read_text())
    tensors = mx.load(str(tmp_path / "text" / "model.safetensors"))
    config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "x"}}
    blind = write(tmp_path / "whole", config, {**tensors, "vision_tower.a": mx.zeros((50, 100))})
    expected = held_bytes(tmp_path / "text") - header_bytes(tmp_path / "text")
    assert held_bytes(blind) - header_bytes(blind) == expected
    seeing = write(tmp_path / "seeing", QWEN_CASES["qwen3_vl"].config, picture_tensors("qwen3_vl"))
    assert held_bytes(seeing) == (seeing / "model.safetensors").stat().st_size


def header_bytes(folder: Path) -> int:
    """Bytes of files that are no tensors."""
    files = read_headers(folder)
    sizes = [info.end - info.start for header in files.values() for info in header.values()]
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) - sum(sizes)
