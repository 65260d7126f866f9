"""Verdicts of comparing mlx-lm's definitions with transformers, and what follows from them."""

from typing import Any

import pytest
from models.zoo_configs import small_config
from models.zoo_table import HOW, MODELS, PAGE, generating_page, other_design

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.models.registry import SUPPORTED, is_native
from mlxinfer.models.zoo.choice import choose
from mlxinfer.models.zoo.compared import (
    ZooVerdict,
    refuse_wrong,
    settings,
    unsupported,
    verdict_of,
    verdicts,
)
from mlxinfer.models.zoo.definitions import Definition, module_of
from mlxinfer.models.zoo.spelling import classes_of, tensors_respelled

TYPES = verdicts()["types"]
LINEAR = {"rope_type": "linear", "type": "linear", "factor": 4.0}


def config_with(kind: str, key: str) -> dict[str, Any]:
    """A config with a value of a key that the definition gets wrong."""
    wrong = TYPES[kind]["wrong"][key]
    value: Any = next((other for other in (True, False, "relu", 7.5) if other not in wrong), None)
    if wrong and type(wrong[0]) is str:
        value = "relu"
    if key == "rope_scaling":
        value = LINEAR
    if key == "sliding_window":
        value = 8
    return {"model_type": kind, key: value}


@pytest.mark.parametrize("kind", [kind for kind, row in TYPES.items() if row.get("wrong")])
def test_what_a_definition_gets_wrong_is_refused_by_key_and_nothing_else(kind: str) -> None:
    for key in TYPES[kind]["wrong"]:
        says = f"ignores {key}, which config.json sets to"
        with pytest.raises(UnsupportedModelError, match=says):
            refuse_wrong(config_with(kind, key))
    right = {key: values[0] for key, values in TYPES[kind]["wrong"].items() if values}
    if "rope_scaling" in right:
        right["rope_scaling"] = {"type": right["rope_scaling"], "factor": 4.0}
    refuse_wrong({"model_type": kind, "sliding_window": None, **right})
    refuse_wrong({"model_type": kind})


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True}, "ignores sliding_window"),
        ("stablelm", {"rope_scaling": LINEAR}, "ignores rope_scaling"),
        ("phi", {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}, "ignores rope_scaling"),
        ("jamba", {"num_experts": 16}, "ignores num_experts.*with num_experts = 1 run"),
        ("internlm2", {"sliding_window": 8}, "does not read sliding_window.* to '8'"),
        ("Klear", {"rope_scaling": LINEAR}, "does not read rope_scaling.* to 'linear'"),
    ],
)
def test_loading_asks_the_verdicts(kind: str, changes: dict[str, Any], says: str) -> None:
    module = module_of(kind)
    assert module is not None
    config = {**small_config(kind, module), **changes}
    with pytest.raises(UnsupportedModelError, match=says):
        choose(config, {})


@pytest.mark.parametrize(
    "off",
    [
        {"use_sliding_window": False},
        {"layer_types": ["full_attention"] * 4},
        {"max_position_embeddings": 8},
        {"rope_scaling": None, "sliding_window": None},
    ],
)
def test_a_window_that_hides_nothing_is_no_window(off: dict[str, Any]) -> None:
    assert "sliding_window" not in dict(settings({"sliding_window": 8, **off}))


def test_each_type_has_one_verdict() -> None:
    """`python -m tests.models.zoo_table generating` drops those of types that became native."""
    runs = {kind for kind, row in TYPES.items() if row["verdict"] in ("agrees", "impossible")}
    refused = {kind for kind, row in TYPES.items() if row["verdict"] == "differs"}
    result = sorted([*runs, *refused, *unsupported(), *SUPPORTED])
    assert len(result) == len(set(result))
    assert set(verdicts()["generating"]) <= set(result)
    assert {*TYPES, *unsupported()} <= set(verdicts()["generating"])
    assert "agrees with transformers" in verdict_of("olmoe")[1]
    assert "no such model" in verdict_of("internlm2")[1]


def test_the_page_of_types_is_the_registrys() -> None:
    """`python -m tests.models.zoo_table generating` writes it."""
    assert PAGE.read_text() == generating_page()


def test_both_pages_say_the_same_of_a_type() -> None:
    """Of models.md the table of mlx-lm's definitions, of model_types.md that of transformers."""
    rows = [line.split("|") for line in MODELS.read_text().splitlines()]
    told = {
        name.strip(" `"): (how.strip(), why.strip())
        for _, how, names, why, *_ in (row for row in rows if len(row) == 5)
        if how.strip() in HOW
        for name in names.split(",")
    }
    assert len(told) > 50
    for name in told.keys() & set(verdicts()["generating"]):
        (how, why), (verdict, _) = told[name], verdict_of(name)
        runs = verdict in (ZooVerdict.COMPARED, ZooVerdict.NOT_COMPARABLE)
        if how in ("batched", "alone") and not runs:
            assert why == other_design(name) != "", name
        assert not (how == "refused" and runs), name


def args_of(config: dict[str, Any]) -> Any:
    module = module_of(config["model_type"], classes_of(config))
    assert module is not None
    return Definition.of(module, config).args


def test_ling_3_is_native_and_ling_2_6_is_not() -> None:
    """Both call themselves bailing_hybrid."""
    for stated in ({"architectures": ["BailingMoeV3ForCausalLM"]}, {"kda_safe_gate": True}):
        assert is_native({"model_type": "bailing_hybrid", **stated})
    older = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"]}
    assert not is_native(older)
    module = module_of("bailing_hybrid", classes_of(older))
    assert module.__name__.endswith(".bailing_hybrid")


def test_names_of_vendors_become_mlx_lms() -> None:
    given = ("transformer.h.0.ln_1.weight", "wte.weight")
    result = tensors_respelled("gpt2", {name: name for name in given})
    assert result == {"h.0.ln_1.weight": given[0], "wte.weight": "wte.weight"}
    given = ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.fc2.weight")
    result = tensors_respelled("nanochat", {name: name for name in given})
    assert [*result] == ["transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight"]


@pytest.mark.alike
@pytest.mark.parametrize(
    ("kind", "renamed"),
    [
        ("gpt2", {"n_ctx": None}),
        ("gpt_neox", {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}),
        ("gpt_bigcode", {"n_inner": None}),
        ("exaone", {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}),
        ("apertus", {"post_norm": None, "qk_norm": None, "mlp_bias": None}),
    ],
)
def test_keys_of_transformers_5_are_read(kind: str, renamed: dict[str, str | None]) -> None:
    module = module_of(kind)
    assert module is not None
    old = small_config(kind, module)
    new = {renamed.get(key, key): value for key, value in old.items()}
    new.pop(None, None)
    for key in renamed:
        expected = {"n_ctx": old.get("n_positions"), "n_inner": 4 * old.get("n_embd", 0)}
        assert getattr(args_of(new), key) == expected.get(key, old.get(key))
