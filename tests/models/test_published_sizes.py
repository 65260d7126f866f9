"""Published models at full size, weights as shapes only: all tensors have places, sums agree.

The tensors are those that transformers saves for these configs, see `tests/data/published`.
"""

import json
from math import prod
from pathlib import Path

import mlx.core as mx
import pytest
from models.names import Shape, expanded
from models.published import PUBLISHED
from models.runs import every

from mlxinfer.cache_specs import StateSpec
from mlxinfer.cli._inspect import share_of_token
from mlxinfer.memory.fit import kv_bytes
from mlxinfer.memory.roofline import Work, estimate, machine
from mlxinfer.memory.suggestions import KV_BYTES, suggestions
from mlxinfer.models.config import normalise
from mlxinfer.models.decoder import Model
from mlxinfer.models.registry import family
from mlxinfer.models.weights.placing import NOWHERE
from mlxinfer.models.weights.source import Checkpoint
from mlxinfer.models.weights.weights import Weights

TENSORS = json.loads(
    (Path(__file__).parents[1] / "data" / "published" / "tensors.json").read_text()
)
GROUP = 64  # of 4 bits: 4.5 a number with scales and biases of 16


def built(name: str, shapes: dict[str, Shape]) -> Model:
    config = normalise(PUBLISHED[name].config)
    builder = family(config.model_type)
    zeros = {name: mx.zeros(shape, mx.bfloat16) for name, shape in shapes.items()}
    source = Checkpoint(zeros, builder.tensor_name)
    weights = Weights(source, NOWHERE, dtype="bfloat16")
    return builder.build(config, weights)


def bytes_at_4_bits(shapes: dict[str, Shape]) -> float:
    """Matrices at 4 bits where groups divide them, all else at 16."""
    packed = [prod(s) for s in shapes.values() if len(s) > 1 and s[-1] % GROUP == 0]
    return sum(packed) * 4.5 / 8 + (sum(map(prod, shapes.values())) - sum(packed)) * 2


LARGE = {  # tens of thousands of tensors each: seconds
    "Qwen3-Next-80B-A3B", "Kimi-K2", "DeepSeek-V3", "Qwen3.5-35B-A3B", "MiniMax-M2",
    "Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V3.2", "GLM-5", "Solar-Open-100B", "dots.llm1",
    "K-EXAONE-236B-A23B", "Hunyuan-A13B", "Hy3", "Trinity-Mini", "Ling-3.0-flash",
    "Laguna-XS.2", "Step-3.5-Flash", "MiMo-V2-Flash", "Qwen3.8-Flash-Next", "Mellum2-12B-A2.5B",
    "Flint-40B-A2.5B", "K2-Horizon-36B-A4B", "Kolibri-1-78B-A3.8B", "Xing4.0-29B-A4B",
    "Inkling-2-Mini", "Sarvam-105B",
    "Sarvam-30B", "MiniMax-M3", "GLM-5.3-Flash", "DeepSeek-V4-Flash",
}  # fmt: skip


@pytest.mark.alike
@pytest.mark.parametrize(
    "name",
    every(2, [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in PUBLISHED]),
)
def test_a_published_model_at_full_size(name):
    """Builds, takes every tensor, and has the published parameters, KV and state."""
    published, shapes = PUBLISHED[name], expanded(TENSORS[name])
    model = built(name, shapes)
    count = sum(map(prod, shapes.values()))
    assert count == pytest.approx(published.billions * 1e9, rel=0.01)
    paged = [spec for spec in model.cache_specs if not isinstance(spec, StateSpec)]
    states = [spec for spec in model.cache_specs if isinstance(spec, StateSpec)]
    assert sum(spec.numbers * 2 for spec in paged) == published.kv
    assert sum(prod(shape) * 4 for spec in states for shape, _ in spec.shapes) == published.state
    of_4096 = sum(spec.numbers * 2 * min(4096, spec.window or 4096) for spec in paged)
    assert kv_bytes(model.config, 4096) == of_4096
    if published.gb_at_4_bits is not None:
        assert bytes_at_4_bits(shapes) == pytest.approx(published.gb_at_4_bits * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "kv", "windows_mb", "gb_at_4_bits"),
    every(
        3,
        [  # by hand from cards and configs
            ("Flint-40B-A2.5B", 39.8, 28_672, 36.8, 22.4),
            ("K2-Horizon-36B-A4B", 37.4, 196_608, 0.0, 21.1),
            ("Xing4.0-29B-A4B", 29.5, 46_080, 0.0, 16.6),
            ("Kolibri-1-78B-A3.8B", 78.1, 20_480, 42.0, 43.9),
            ("Inkling-2-Mini", 26.07, 32_768, 167.8, 14.7),
            ("IQuest-Coder-V1-40B", 39.8, 327_680, 0.0, 22.4),
            ("MiMo-V2-Flash", 308.8, 23_040, 25.8, 173.7),  # V2.5 is as large
        ],
    ),
)
def test_what_a_model_of_november_takes(
    name: str, billions: float, kv: int, windows_mb: float, gb_at_4_bits: float
) -> None:
    """Parameters, bytes of a token beyond the windows, the windows' own, a conversion to 4 bits."""
    config, shapes = normalise(PUBLISHED[name].config), expanded(TENSORS[name])
    assert sum(map(prod, shapes.values())) == pytest.approx(billions * 1e9, rel=0.002)
    long, longer = kv_bytes(config, 100_000), kv_bytes(config, 100_001)
    assert longer - long == kv
    assert (long - 100_000 * kv) / 1e6 == pytest.approx(windows_mb, abs=0.1)
    assert bytes_at_4_bits(shapes) == pytest.approx(gb_at_4_bits * 1e9, rel=0.005)


def test_every_family_has_a_published_model():
    """But for encoders, texts of models that see, and configs that could not be looked up."""
    from mlxinfer.models.registry import ENCODERS, FAMILIES

    built_by = {FAMILIES[p.config["model_type"]] for p in PUBLISHED.values()}
    texts = {
        "glm4v_text",
        "glm_ocr_text",
        "muse_glimmer_text",
        "ernie4_5_vl_moe_text",
    }  # see test_wrappers.py
    packs = {"prism_hadamard_qwen35"}  # the sizes of Qwen3.5-27B, see test_bonsai.py
    others = {
        *ENCODERS,
        *texts,
        *packs,
        "cohere2_moe",
        "cohere2moe",
        "nemotron_h_puzzle",
        "mimo_v2",
    }
    assert {family for name, family in FAMILIES.items() if name not in others} == built_by


@pytest.mark.parametrize("name", ["Gemma-4-E4B", "Gemma-4-31B", "GLM-4.7-Flash", "Qwen3.5-27B"])
def test_the_table_of_suggestions_agrees_with_published_shapes(name):
    wanted = name.lower().removeprefix("qwen3.5-")  # of one size in 3.5 and 3.6
    (actual,) = [s for s in suggestions() if wanted in s.name.lower()]
    published = PUBLISHED[name]
    assert actual.parameters == pytest.approx(published.billions * 1e9, rel=0.01)
    assert 0 < actual.layers * actual.kv_numbers * KV_BYTES <= published.kv


@pytest.mark.parametrize(
    ("name", "active", "answers", "prompts"),
    [  # bandwidth / (weights and KV cache at 2,048 tokens), by hand from names and cards
        ("Qwen3-8B", 7.6, (90, 120), (970, 1220)),
        ("Qwen3-30B-A3B", 3.0, (214, 286), (2420, 3020)),
        ("gpt-oss-20b", 3.6, (197, 262), (2040, 2550)),
        ("Granite-4.0-H-Tiny", 1.47, (440, 585), (5020, 6280)),
        ("Gemma-4-E2B", 2.3, (309, 412), (3230, 4040)),
    ],
)
def test_a_token_is_counted_with_what_it_is_computed_with(name, active, answers, prompts):
    published, shapes = PUBLISHED[name], expanded(TENSORS[name])
    config = normalise(published.config)
    weights = sum(share_of_token(key, shape, config) * prod(shape) for key, shape in shapes.items())
    assert weights == pytest.approx(active * 1e9, rel=0.03)
    work = Work(int(weights * 4.5 / 8), int(weights))
    size = int(published.billions * 1e9 * 4.5 / 8)
    limits = estimate(config, size, work, machine("M4 Max, 64 GB"), 2048)
    assert limits["decode_tokens_per_s"] == pytest.approx(answers, rel=0.03)
    assert limits["prefill_tokens_per_s"] == pytest.approx(prompts, rel=0.03)
    assert limits["fit"]["verdict"] != "too large"
