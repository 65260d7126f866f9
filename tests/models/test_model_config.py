"""config.json in every spelling becomes one ModelConfig; hostile ones become CheckpointError."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.cases import CASES
from models.tiny import tiny_config

from mlxinfer import errors
from mlxinfer.errors import CheckpointError, MlxinferError
from mlxinfer.layers.rope import RopeSpec
from mlxinfer.models.config import load_config, normalise
from mlxinfer.models.quantization import QuantFormat
from mlxinfer.models.registry import family
from tests.tables import table

TABLES: Any = table(__file__, "config.yml")

UNUSED = {"minimax_m3_vl_text-v4": {"activation": "swigluoai"}}  # one formula, whatever the name
LINEAR = {"type": "linear", "factor": 4.0, "mrope_section": [4, 4, 4]}
YARN = {"type": "yarn", "factor": 4.0}


def llama(**changes):
    config = {**tiny_config("llama"), "rope_scaling": None, **changes}
    return {key: value for key, value in config.items() if value is not ...}


def test_configs_that_transformers_reads_and_saves_are_of_the_same_models():
    """From the older spelling of each type to the newest, `tests/data/parity/generate.py`."""
    path = Path(__file__).parents[1] / "data" / "parity" / "saved_configs.json"
    changes = json.loads(path.read_text())
    kinds = {CASES[name]["model_type"] for name in changes}
    kinds |= {"k2_horizon", "xing4_0"}  # which transformers has no class for
    assert kinds == {config["model_type"] for config in CASES.values()}
    for name, change in changes.items():
        kept = {key: value for key, value in CASES[name].items() if key not in change["gone"]}
        actual, expected = normalise({**kept, **change["new"]}), normalise(CASES[name])
        assert replace(actual, dtype=expected.dtype, **UNUSED.get(name, {})) == expected, name


# Rope, in both spellings.


@pytest.mark.parametrize(("old", "new", "expected"), TABLES["rope_spellings"])
def test_both_spellings_of_rope(old, new, expected):
    for spelling in (old, new):
        config = normalise(llama(rope_theta=..., rope_scaling=...) | spelling)
        assert config.ropes == (RopeSpec(**expected),) * 3


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, ("linear", 500.0, 4.0)),
        ({"rope_theta": 500.0}, ("linear", 500.0, 4.0)),
        ({"rope_type": "linear", "factor": 4, "rope_theta": 500.0}, ("linear", 500.0, 4.0)),
        ({"type": "linear", "factor": 4, "rope_theta": 500.0}, ("linear", 500.0, 4.0)),
    ],
)
def test_rope_scaling_is_switched_on_beside_rope_parameters(new, expected):
    rope = normalise(llama(rope_parameters=new, rope_scaling=LINEAR)).ropes[0]
    assert (rope.kind, rope.theta, rope.factor) == expected


def test_two_ways_to_scale_positions_are_refused():
    new = {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
    with pytest.raises(CheckpointError, match="two ways"):
        normalise(llama(rope_parameters=new, rope_scaling=LINEAR))
    for unsaid in ({"rope_type": "default"}, None):
        assert normalise(llama(rope_parameters=new, rope_scaling=unsaid)).ropes[0].factor == 8.0


@pytest.mark.parametrize("changes", [{"long_factor": [1.0]}, {"short_factor": [0.0] * 12}])
def test_long_rope_has_a_factor_for_each_pair(changes):
    stated = {"type": "su", "short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    rope = normalise(llama(rope_scaling=stated, original_max_position_embeddings=32)).ropes[0]
    assert (rope.kind, rope.original_context, rope.long.pair_factors) == (
        "longrope",
        32,
        (2.0,) * 12,
    )
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        normalise(llama(rope_scaling=stated | changes))


# Windows.


@pytest.mark.parametrize(
    ("case", "changes", "windows"), TABLES["windows"]
)  # fmt: skip
def test_windows_of_layers_are_those_of_the_config(case, changes, windows):
    assert normalise(tiny_config(case) | changes).windows == tuple(windows)


@pytest.mark.parametrize(("case", "stated"), TABLES["ignored"])
def test_fields_that_an_architecture_does_not_read_change_nothing(case, stated):
    assert normalise(tiny_config(case) | stated) == normalise(tiny_config(case))


@pytest.mark.parametrize(
    "key", ["rope_theta", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor"]
)
def test_a_null_about_positions_is_silence(key):
    cases = [case for case in CASES.values() if key in family(case["model_type"]).defaults]
    for case in cases:
        silent = {name: value for name, value in case.items() if name != key}
        with suppress(CheckpointError):  # two versions of DeepSeek's ropes need each other
            assert normalise(silent | {key: None}) == normalise(silent), case["model_type"]
    assert cases


@pytest.mark.parametrize("key", ["final_logit_softcapping", "query_pre_attn_scalar"])
def test_what_few_families_read_changes_no_other(key):
    others = [case for case in CASES.values() if key not in family(case["model_type"]).defaults]
    assert len(others) > 100
    for case in others:
        assert key not in case
        assert normalise(case | {key: 7.0}) == normalise(case), case["model_type"]


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_window_of_qwen_has_a_size_of_its_own(case):
    config = tiny_config(case) | {"use_sliding_window": True, "max_window_layers": 2}
    config.pop("sliding_window", None)
    config.pop("layer_types", None)
    assert normalise(config).windows[-1] == 4096


# What families assume.


def test_a_bare_gemma_text_config_means_the_4b_model():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024}  # fmt: skip
    config = normalise(
        {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    )
    assert config.model_type == "gemma3_text"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262_208
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.attention_scale == 1 / 16


def test_heads_of_gemma_4_in_both_spellings():
    old = normalise(tiny_config("gemma4_text-v4"))
    assert old.heads == ((2, 24), (2, 24), (1, 32)) * 2
    assert normalise(tiny_config("gemma4_text-v5")).heads == ((2, 24), (2, 24), (2, 40)) * 2
    overrides = {"per_layer_config": {"2": {"head_dim": 8}}}
    assert normalise(tiny_config("gemma4_text-v4") | overrides).heads[2] == (2, 8)
    for key in ("6", "-1", "x"):
        with pytest.raises(CheckpointError, match="layer's number"):
            normalise(tiny_config("gemma4_text-v5") | {"per_layer_config": {key: {}}})


def test_gpt_oss_defaults_to_yarn():
    stated = dict(tiny_config("gpt_oss-v4"))
    del stated["rope_scaling"]
    rope = normalise(stated).ropes[0]
    assert (rope.kind, rope.factor, rope.original_context, rope.truncate) == (
        "yarn",
        32.0,
        4096,
        False,
    )
    assert normalise(stated | {"rope_scaling": None}).ropes[0].kind == "default"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 128),
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, 128),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    ],
)  # fmt: skip
def test_the_longest_context_is_read_with_its_rope_scaling(changes, expected):
    assert normalise(llama(**changes)).max_context == expected


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [7, 2]}, (7, 2)),
        (None, {}, ()),
        ([2, -1], {"eos_token_id": [5000]}, (2,)),  # what the model cannot say
    ],
)
def test_end_tokens_of_both_files(tmp_path, stated, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(llama(eos_token_id=stated)))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == expected


# Quantisation.


def test_exceptions_of_a_quantisation_count_for_their_paths():
    stated = {
        "group_size": 64,
        "bits": 4,
        "lm_head": False,
        "a.gate": {"group_size": 32, "bits": 8},
    }
    for key in ("quantization", "quantization_config"):
        quantization = normalise(llama(**{key: stated})).quantization
        assert quantization.of("anything") == QuantFormat(64, 4)
        assert quantization.of("a.gate") == QuantFormat(32, 8)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"mode": "mxfp4"}, QuantFormat(32, 4, "mxfp4")),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}, QuantFormat(32, 4, "mxfp4")),
        ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, QuantFormat(16, 4, "nvfp4")),
    ],
)
def test_each_quantisation_mode_has_its_group_and_bits(stated, expected):
    assert normalise(llama(quantization_config=stated)).quantization.default == expected


# Hostile configs: the message names the key.


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in TABLES["hostile"].items() for value in values],
)
def test_hostile_values_are_named(key, value):
    with pytest.raises(CheckpointError) as caught:
        normalise(llama(**{key: value}))
    named = (key, "factor", "type", "dimensions") if "rope" in key or "rot" in key else (key,)
    assert any(name in str(caught.value) for name in named)
    assert len(str(caught.value)) < 300


def test_heads_need_a_size():
    config = llama(head_dim=..., hidden_size=3, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(CheckpointError, match=r"hidden_size is 3 .*expected more, or a head_dim"):
        normalise(config)
    assert normalise(config | {"head_dim": 16}).head_dim == 16
    assert normalise(config | {"hidden_size": 8}).head_dim == 2


def test_a_bidirectional_window_counts_both_sides():
    config = normalise(tiny_config("gemma3_text") | {"use_bidirectional_attention": True})
    assert config.bidirectional
    assert set(config.windows) == {None, tiny_config("gemma3_text")["sliding_window"] // 2 + 1}


@pytest.mark.parametrize(("case", "changes", "error", "words"), TABLES["refused"])
def test_what_would_change_the_answers_is_refused(case, changes, error, words):
    with pytest.raises(getattr(errors, error), match=words):
        normalise(tiny_config(case) | changes)


def test_a_list_of_types_may_go_on_with_layers_that_predict_further_ahead():
    config = tiny_config("exaone4-v4")
    longer = config | {"layer_types": [*config["layer_types"], "sliding_attention"]}
    assert normalise(longer).windows == normalise(config).windows
    with pytest.raises(CheckpointError, match="must be 5 times"):
        normalise(longer | {"num_nextn_predict_layers": 0})


@pytest.mark.parametrize(
    "stated",
    [
        {"index_topk_freq": 3, "index_skip_topk_offset": 2},
        {"index_topk_freq": 1, "index_topk_pattern": "FFSSFS"},
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
    ],
)
def test_layers_share_an_indexer_as_any_spelling_says(stated):
    config = normalise(tiny_config("glm_moe_dsa-shared") | stated)
    assert family("glm_moe_dsa").between_stages(config).bound == {2, 3, 5}


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"model_type": NaN}', b'{"a": 1, "a": 2}', b"\xff\xfe{}", b"[" * 100_000,
     b'{"a": ' + b"9" * 10_000 + b"}"],
)  # fmt: skip
def test_a_config_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json (is not sound JSON|holds a list)"):
        load_config(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


@given(st.sampled_from(sorted(CASES)), st.data(), JUNK)
def test_junk_anywhere_is_an_error_of_ours_or_harmless(case, data, junk):
    config = {**CASES[case], "quantization": {"group_size": 64, "bits": 4}}
    key = data.draw(st.sampled_from(sorted(config)))
    if isinstance(config[key], dict) and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(sorted(config[key])))
        junk = {**config[key], inner: junk}
    with suppress(MlxinferError):
        normalise({**config, key: junk})
