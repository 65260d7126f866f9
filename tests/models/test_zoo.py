"""Architectures without a native family: chosen, loaded and checked, or refused in a line."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from models.zoo_configs import OVERRIDES, SLIDING, small_config
from models.zoo_table import randomise, row, small_model

from benchmarks.processes import run_python
from mlxinfer.cache_specs import KVSpec, OwnCacheSpec
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.models import load_any, load_any_config
from mlxinfer.models.zoo import choice, definitions
from mlxinfer.models.zoo.choice import choose, quantise
from mlxinfer.models.zoo.definitions import Definition, module_of, with_narrow_windows
from mlxinfer.models.zoo.running import AloneModel, FlatCache, FlatModel
from mlxinfer.models.zoo.spelling import respelled

IDS = mx.array([[5, 9, 100, 3, 77]])


def definition_of(name: str, **changes: Any) -> tuple[dict[str, Any], Definition]:
    """A config and its definition with random weights."""
    module = module_of(name)
    assert module is not None
    raw = {**small_config(name, module), **changes}
    definition = choose(raw, {})[1]
    randomise(definition)
    return raw, definition


def save(folder: Path, raw: dict[str, Any], definition: Definition) -> Path:
    """A checkpoint folder of the definition's weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = dict(tree_flatten(definition.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def test_a_checkpoint_loads_and_gives_the_logits_of_its_definition(tmp_path: Path) -> None:
    raw, definition = definition_of("stablelm")
    model = load_any(save(tmp_path, raw, definition))
    assert isinstance(model, FlatModel)
    assert model.num_bytes == definition.num_bytes
    expected = definition(IDS, definition.own_caches())[0]
    logits = model.definition(IDS, model.definition.own_caches())[0]
    np.testing.assert_array_equal(np.array(logits), np.array(expected))


def test_a_quantised_checkpoint_loads_with_layers_that_are_not(tmp_path: Path) -> None:
    raw, definition = definition_of("dbrx", quantization={"group_size": 32, "bits": 8})
    kept = {"transformer.wte", "lm_head"}
    formats = {
        path: {"group_size": 32, "bits": 8, "mode": "affine"}
        for path, module in definition.model.named_modules()
        if isinstance(module, nn.Linear) and path not in kept
    }
    quantise(definition.model, formats)
    model = load_any(save(tmp_path, raw, definition))
    assert isinstance(model, FlatModel)
    actual = dict(model.definition.model.named_modules())
    assert isinstance(actual["transformer.blocks.0.norm_attn_norm.attn.Wqkv"], nn.QuantizedLinear)
    assert type(actual["lm_head"]) is nn.Linear
    expected = definition(IDS, definition.own_caches())
    logits = model.definition(IDS, model.definition.own_caches())
    assert mx.allclose(logits, expected, atol=1e-5)


def test_recurrent_layers_run_alone_and_say_why(tmp_path: Path) -> None:
    raw, definition = definition_of("mamba")
    folder = save(tmp_path, raw, definition)
    config = load_any_config(folder)
    assert config.alone_because == "a layer keeps the state of a recurrence or a convolution"
    model = load_any(folder)
    assert isinstance(model, AloneModel)
    assert model.lacks.keys() == {"prefix_cache", "disk_cache", "speculation", "adapters"}
    (spec,) = model.cache_specs
    assert isinstance(spec, OwnCacheSpec)
    states = 4 * (3 * 128 + 128 * 16) * 4  # layers x (convolution + recurrence) x float32
    assert (spec.numbers, spec.num_bytes) == (0, states)


def test_what_is_kept_is_learnt_from_the_definition() -> None:
    """Windows, head sizes of keys and values, and sinks differ from layer to layer."""
    module = module_of("mimo_v2_flash")
    assert module is not None
    sizes = {"swa_head_dim": 24, "swa_num_key_value_heads": 4, "v_head_dim": 8}
    raw = {**small_config("mimo_v2_flash", module), **sizes}
    config, _ = choose(raw, {})
    full, window = KVSpec(2, 16, 8), KVSpec(4, 24, 16, 8)
    assert config.cache_specs == (full, window, window, full)
    assert config.windows == (None, 8, 8, None)


def test_the_spelling_of_transformers_5_is_read() -> None:
    """Its theta would else be ignored without a word."""
    module = module_of("stablelm")
    assert module is not None
    raw = small_config("stablelm", module)
    theta = raw.pop("rope_theta")
    new = {**raw, "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
    assert Definition.of(module, {**raw, "rope_theta": theta}).args.rope_theta == theta
    assert Definition.of(module, new).args.rope_theta == 12345.0
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1.0}
    result = respelled(module_of("internlm2").ModelArgs, {"rope_parameters": scaled})  # type: ignore[union-attr]
    assert result["rope_scaling"]["type"] == "linear"
    assert result["rope_scaling"]["factor"] == 4.0


def test_a_batched_model_that_differs_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are off by one are a difference that only logits show."""
    begin = FlatCache.begin

    def begin_late(self: FlatCache, layer: Any, positions: mx.array) -> None:
        begin(self, layer, positions * 2)

    monkeypatch.setattr(FlatCache, "begin", begin_late)
    entry = row("stablelm")
    assert entry.how == "alone"
    assert "gives other logits than mlx-lm's own run" in entry.because


def test_a_window_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = choice.DenseLayer._attend_one

    def attend_less(self: Any, *arguments: Any) -> mx.array:
        narrow = choice.DenseLayer(KVSpec(1, 1, 1, self._window and self._window - 1))
        narrow._past = self._past
        return attend(narrow, *arguments)

    monkeypatch.setattr(choice.DenseLayer, "_attend_one", attend_less)
    assert small_model("mimo_v2_flash").config.alone_because is not None


def test_a_definition_that_chunks_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Definition, "hidden", lambda self, ids, caches: self(ids, self.own_caches())
    )
    entry = row("mamba")
    assert entry.how == "refused"
    assert "in chunks and steps it gives other logits" in entry.because


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_thing", "is defined neither here nor by mlx-lm"),
        ("qwen3_mo", "Alike, and defined: qwen3_moe"),
        ("switch_layers", "is defined neither here nor by mlx-lm"),
        ("olmo", "pip install ai2-olmo"),
        ("phi3small", "tokens see later ones"),
    ],
)
def test_what_does_not_run_says_why_in_a_line(name: str, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        choose({"model_type": name}, {})
    assert "\n" not in str(caught.value)


def test_without_mlx_lm_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "installed", lambda: None)
    with pytest.raises(UnsupportedModelError, match=r'pip install -e "\.\[zoo\]"'):
        choose({"model_type": "stablelm"}, {})


def test_configs_and_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing .* required positional"):
        choose({"model_type": "stablelm"}, {})
    raw, definition = definition_of("stablelm")
    del definition.model.model.layers[0].mlp.gate_proj["weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight"):
        load_any(save(tmp_path, raw, definition))


def python(*arguments: str) -> list[str]:
    """The lines that Python prints in the folder of the project."""
    return run_python(*arguments).lines


def test_mlx_lm_itself_is_not_imported_and_limits_stay() -> None:
    """Importing it takes seconds, and leaves the process with fewer files to open."""
    code = """
import resource, sys
before = resource.getrlimit(resource.RLIMIT_NOFILE)
sys.path.insert(0, "tests")
from models.zoo_table import row
assert row("stablelm").how == "batched"
assert row("plamo2").how == "alone"  # its file imports mlx_lm.models by name
assert not {"mlx_lm", "transformers"} & set(sys.modules), "imported"
print(before == resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert python("-c", code) == ["True"]


def test_windows_are_narrow_in_the_check_wherever_they_are_stated() -> None:
    for name, place in [("mimo_v2_flash", "sliding_window_size"), ("plamo3", "window_size")]:
        narrow = with_narrow_windows(definition_of(name)[1], 6)
        assert getattr(narrow.args, place) == 6
    inner = {"model_type": "llama", "sliding_window": 50, "layer_types": SLIDING}
    text = {**OVERRIDES["mistral3"]["text_config"], **inner}
    narrow = with_narrow_windows(definition_of("mistral3", text_config=text)[1], 6)
    assert narrow.args.text_config["sliding_window"] == 6
    assert with_narrow_windows(definition_of("stablelm")[1], 6) is None


def test_a_native_model_loads_without_any_of_this() -> None:
    code = (
        "import sys; from mlxinfer.hub import resolve; from mlxinfer.models import load_any\n"
        "load_any(resolve('demo')); print('mlxinfer.models.zoo' in sys.modules)"
    )
    assert python("-c", code) == ["False"]


@pytest.mark.slow
def test_what_mlx_lm_converts_loads_and_gives_its_logits() -> None:
    lines = python("-m", "tests.models.zoo_converted")
    pairs = [line.split() for line in lines if line[:1] != "["]  # others are mlx-lm's own
    by_name = {name: float(worst) for name, worst in pairs}
    assert len(by_name) > 50
    assert max(by_name.values()) < 1e-4, by_name


@pytest.mark.slow
def test_architectures_of_mlx_lm_are_native_batched_alone_or_refused_for_a_reason() -> None:
    refused = {
        name: entry.because
        for name in definitions.architectures()
        if (entry := row(name)) is not None and entry.how == "refused"
    }
    metal = {} if mx.metal.is_available() else {"bitnet", "muse_spark"}
    assert refused.keys() <= {"olmo", "phi3small", "prism_hadamard_qwen35", *metal}, refused
