"""All that keys and values depend on is in the names of their pages.

Each input is listed: what a name holds, and what no key and no value depends on. A field that is
new fails here until somebody says which it is. Pictures have the same test in test_pictures.py.
"""

from dataclasses import fields
from typing import Any

import mlx.core as mx
import pytest
from engine.harness import config, tiny_model
from models.zoo_table import small_model

from mlxinfer.cache.layout import LAYERS
from mlxinfer.config import EngineConfig, KVOptions
from mlxinfer.core import Request
from mlxinfer.engine.batch import namespace_of
from mlxinfer.engine.model_cache import cache_layers, disk_identity, make_cache
from mlxinfer.models.language import LanguageModel
from mlxinfer.models.zoo import running

CASE = "gemma3_text-v4"  # layers with a window of their own, and layers without
Q8 = KVOptions(bits=(8, 8))
WINDOW = KVOptions(window=64)
OTHERWISE = {  # KVOptions: a field, and options that differ in it alone
    "bits": (KVOptions(), Q8),
    "window": (WINDOW, KVOptions(window=32)),
    "sinks": (WINDOW, KVOptions(window=64, sinks=4)),
}


def identity(model: Any, *, weights: str = "", kernels: str = "", form: str = "", **changes: Any):
    """What pages on disk and at peers are named after, beside the prompt."""
    sizes = config(**changes)
    cache = make_cache(model, sizes, cache_layers(model, sizes))
    return disk_identity(weights, model, cache, kernels, form)


def test_the_options_of_the_engine() -> None:
    named = {"page_size", "kv"}
    sizes = {"max_batch", "max_context", "kv_budget_bytes", "num_pages"}
    sizes |= {"feature_bytes", "adapter_bytes"}
    when = {"prefill_chunk", "prefill_slice_s", "prefill_fixed"}  # not what
    where = {"prefix_cache", "disk", "peers"}
    assert named | sizes | when | where == {field.name for field in fields(EngineConfig)}
    model = tiny_model(CASE)
    assert identity(model, page_size=32) != identity(model)
    assert identity(model, max_batch=4, prefill_chunk=32) == identity(model)


@pytest.mark.parametrize("field", [field.name for field in fields(KVOptions)])
def test_the_options_of_the_kv_cache(field: str) -> None:
    one, other = (identity(tiny_model(CASE), kv=options) for options in OTHERWISE[field])
    assert one != other


@pytest.mark.parametrize("spec", LAYERS, ids=lambda spec: spec.__name__)
def test_what_a_layer_keeps(spec: type) -> None:
    """The identity of a cache writes out the specs of its layers."""
    assert all(field.repr for field in fields(spec))  # type: ignore[arg-type]
    assert spec.__repr__ is not object.__repr__


def test_all_of_a_request_that_keys_and_values_depend_on_names_its_pages() -> None:
    named = {"prompt_ids", "pictures", "adapter", "cache_salt"}
    answer = {"params", "stop_ids", "prompt_logits", "grammar", "breakers", "reports_prompt"}
    who = {"id", "owner", "tenant", "id_slot", "from_peer", "priority", "page_priority"}
    counts = {"boundaries", "arrived_s", "started_s", "num_drafted", "num_accepted", "reuse"}
    assert named | answer | who | counts == {field.name for field in fields(Request)}
    names = [namespace_of(*parts) for parts in ((None, 0, None), ("a", 0, None), (None, 1, None))]
    names += [namespace_of(None, 0, "salt"), namespace_of("a", 0, "salt"), namespace_of("b", 0, "")]
    assert len(set(names)) == len(names)


def test_every_member_of_a_model_is_in_its_identity_or_named_as_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {"config", "num_bytes"}  # the identity of a checkpoint is of config.json, too
    named = {"mixers", "cache_specs", "activation_dtype", "kernels", "rope_variant"}
    keyed = {"tower"}  # a picture's digest is of its processor
    other = {"logits", "lacks", "rope_axes", "expert_store"}  # how the same numbers come about
    members = {name for name in vars(LanguageModel) if not name.startswith("_")}
    assert weights | named | keyed | other == members
    model = tiny_model(CASE)
    identities = {
        identity(model),
        identity(model, weights="other"),
        identity(tiny_model("qwen3-v4")),
    }
    identities |= {identity(model, kernels="text"), identity(model, form="half of it")}
    with monkeypatch.context() as patch:
        dtype = mx.bfloat16 if model.activation_dtype != mx.bfloat16 else mx.float16
        patch.setattr(model, "activation_dtype", dtype)
        identities.add(identity(model))
    assert len(identities) == 6


def test_the_version_of_mlx_lm_for_models_that_it_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, native = small_model("gpt_neox"), tiny_model(CASE)
    before = identity(foreign), identity(native)
    monkeypatch.setattr(running, "installed", lambda: "999")
    assert identity(foreign) != before[0]
    assert identity(native) == before[1]
