"""Adapters that cannot be right are refused by name, in one line, and leave the model as it was."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapters.drawn import Drawn, dense_tensors, draw, write_mlx, write_peft
from engine.harness import Harness, prompt
from models.tiny import arrays_in, config_of, tiny_checkpoint

from mlxinfer.core import SamplingParams
from mlxinfer.errors import CheckpointError, InvalidRequestError, ModelError
from mlxinfer.models import load
from mlxinfer.models.adapters.loaded import ModelAdapters, read_adapter
from mlxinfer.models.decoder import Model

CASE = "qwen3-v4"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, mx.array]:
    return dense_tensors(tiny_checkpoint(tmp_path_factory.mktemp("base"), CASE))


@cache
def own_model(case: str) -> Model:
    """A model that other tests do not load adapters on."""
    return load(tiny_checkpoint(Path(mkdtemp()), case))


def refused(folder: Path, case: str = CASE) -> str:
    """Why an adapter is refused."""
    harness = Harness(own_model(case))
    with pytest.raises((ModelError, InvalidRequestError)) as caught:
        for _ in harness.loop.adapters.load("x", read_adapter(folder)):
            pass
    assert harness.loop.adapters.names == ()
    assert harness.loop.adapters.num_bytes == 0
    assert not harness.loop.model.adapted
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _nan(drawn: Drawn) -> None:
    drawn.b[Q][3, 1] = np.nan


def _wide(drawn: Drawn) -> None:
    drawn.a[Q] = np.pad(drawn.a[Q], [(0, 0), (0, 8)])


def _rank(drawn: Drawn) -> None:
    drawn.a[Q], drawn.b[Q] = drawn.a[Q][:2], drawn.b[Q][:, :2]


def _missing(drawn: Drawn) -> None:
    for path in [path for path in drawn.a if "layers.2." in path]:
        del drawn.a[path]


@pytest.mark.parametrize("write", [write_peft, write_mlx])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_nan, "holds NaN or infinity"),
        (_wide, "made for another model"),
        (_rank, "have rank 2"),
        (_missing, "has no matrices for 'model.layers.2."),
    ],
)
def test_matrices_that_do_not_fit(
    tmp_path: Path,
    tensors: dict[str, mx.array],
    write: Callable[[Path, Drawn], Path],
    change: Callable[[Drawn], None],
    said: str,
) -> None:
    drawn = draw(tensors, 1)
    change(drawn)
    assert said in refused(write(tmp_path / "bad", drawn))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"bias": "all"}, "bias in"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save in"),
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"layer_replication": [[0, 2]]}, "layers of the base are repeated"),
        ({"r": 1 << 19}, "have rank 4"),
        ({"target_modules": ["q_proj"]}, "does not name"),
        ({"target_modules": "(("}, "cannot be read"),
        ({"use_dora": True}, "lacks DoRA's lengths"),
        ({"lora_alpha": "x"}, "lora_alpha in"),
        ({"rank_pattern": {"q_proj": 5}}, "says 5"),
        ({"rank_pattern": {"q_proj": 0}}, "expected 1 or more"),
        ({"layers_to_transform": ["0", None]}, "must be numbers of layers"),
        ({"layers_to_transform": [0, 1, 2, 3], "layers_pattern": "h"}, "does not name"),
        ({"layers_to_transform": [0], "layers_pattern": [1]}, "must be names of lists of layers"),
        ({"layers_to_transform": [0], "layers_pattern": "(("}, "cannot be read"),
    ],
)
def test_configs_that_ask_for_something_else(
    tmp_path: Path, tensors: dict[str, mx.array], config: dict[str, Any], said: str
) -> None:
    assert said in refused(write_peft(tmp_path / "bad", draw(tensors, 1), **config))


def test_tensors_that_are_not_known(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    folder = write_peft(tmp_path / "bad", draw(tensors, 1))
    file = folder / "adapter_model.safetensors"
    arrays = dict(mx.load(str(file)))
    for name, said in (
        ("base_model.model.model.norm.weight", "no matrix of low rank"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "token table"),
        ("base_model.model.model.layers.0.nothing.lora_A.weight", "has no matrix B"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "expected base_model.model."),
    ):
        mx.save_safetensors(str(file), {**arrays, name: mx.zeros((4, 64))})
        assert said in refused(folder)


def test_pickles_are_never_opened(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    folder = write_peft(tmp_path / "bad", draw(tensors, 1))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in refused(folder)


def test_what_no_adapter_can_change_is_named(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    tied = Path(tiny_checkpoint(tmp_path / "tied", CASE))
    config_of(tied, tie_word_embeddings=True)
    arrays = arrays_in(tied)
    arrays.pop("lm_head.weight", None)
    mx.save_safetensors(str(tied / "model.safetensors"), arrays)
    drawn = draw(
        {**tensors, "lm_head.weight": arrays["model.embed_tokens.weight"]},
        1,
        pattern=r"lm_head|q_proj",
    )
    harness = Harness(load(tied))
    folder = write_peft(tmp_path / "bad", drawn)
    with pytest.raises(ModelError, match="'lm_head', which is tied to the token table"):
        next(harness.loop.adapters.load("x", read_adapter(folder)), None)


def test_folded_matrices_and_experts_with_dora_are_named(tmp_path: Path) -> None:
    case = "deepseek_v3-v4"
    tensors = dense_tensors(tiny_checkpoint(tmp_path / "base", case))
    folded = write_peft(tmp_path / "folded", draw(tensors, 1, pattern="kv_b_proj"))
    assert "kv_b_proj" in refused(folded, case)
    assert "fuse" in refused(folded, case)
    experts = write_peft(tmp_path / "experts", draw(tensors, 1, pattern=r"experts\.\d", dora=True))
    assert "DoRA on experts" in refused(experts, case)


def test_configs_and_matrices_of_others(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    folder = write_mlx(tmp_path / "full", draw(tensors, 1), fine_tune_type="full")
    assert "whole matrices, not an adapter" in refused(folder)
    folder = write_mlx(tmp_path / "mixed", draw(tensors, 1), peft_type="LORA")
    assert "is PEFT's, and adapters.safetensors is not" in refused(folder)
    (folder / "adapters.safetensors").write_bytes(b"\xff" * 64)
    (folder / "adapter_config.json").write_text(
        json.dumps({"num_layers": -1, "lora_parameters": {"rank": 4, "scale": 1.0}})
    )
    with pytest.raises(CheckpointError, match="header too large"):
        read_adapter(folder)


@pytest.mark.parametrize("pattern", [None, "layers", ["h", "layers"]])
def test_layers_to_transform_and_the_pattern_of_their_names(
    tmp_path: Path, tensors: dict[str, mx.array], pattern: object
) -> None:
    drawn = draw(tensors, 1, pattern=r"layers\.[02]\..*_proj")
    stated = {"layers_to_transform": [0, 2], "layers_pattern": pattern}
    adapter = read_adapter(write_peft(tmp_path / "a", drawn, **stated))
    assert {module.path.split(".")[2] for module in adapter.modules} == {"0", "2"}
    wanted = [adapter.wants(f"model.layers.{i}.mlp.up_proj", 4) for i in range(4)]
    assert wanted == [True, False, True, False]


@pytest.mark.parametrize("dora", [False, True])
def test_the_memory_of_an_adapter_is_known_before_it_is_loaded(
    tmp_path: Path, tensors: dict[str, mx.array], dora: bool
) -> None:
    adapter = read_adapter(write_peft(tmp_path / "a", draw(tensors, 1, dora=dora)))
    loaded = ModelAdapters(own_model(CASE))
    placements, number = loaded.check(adapter), loaded.new_number()
    for _ in loaded.load(number, adapter, placements):
        pass
    assert loaded.estimate(placements) == loaded.bytes_of(number)
    loaded.remove(number)


def test_memory_beside_counted_pages(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    folder = write_peft(tmp_path / "a", draw(tensors, 1, rank=64))
    for budget, fits in ((1 << 24, True), (1 << 18, False)):
        harness = Harness(own_model(CASE), kv_budget_bytes=budget, num_pages=16)
        loading = harness.loop.adapters.load("x", read_adapter(folder))
        if fits:
            list(loading)
            list(harness.loop.adapters.unload("x"))
            harness.turn()
        else:
            with pytest.raises(InvalidRequestError, match="no room for the adapter"):
                list(loading)
        assert harness.loop.cache.groups[0].allocator.num_pages == 16


def test_memory_is_borrowed_from_the_kv_cache(tmp_path: Path, tensors: dict[str, mx.array]) -> None:
    folder = write_peft(tmp_path / "a", draw(tensors, 1, rank=64))
    harness = Harness(own_model(CASE), kv_budget_bytes=1 << 22)
    table, group = harness.loop.adapters, harness.loop.cache.groups[0]
    pages, names = group.allocator.num_pages, []

    def load_until_full() -> None:
        for i in range(100):
            list(table.load(f"x{i}", read_adapter(folder)))
            names.append(f"x{i}")

    with pytest.raises(InvalidRequestError, match="no room for the adapter"):
        load_until_full()
    assert names
    taken = (pages - group.allocator.num_pages) * group.page_bytes
    assert table.num_bytes <= taken < table.num_bytes + group.page_bytes
    harness.add("a", prompt(40), SamplingParams(max_tokens=4), adapter="x0")
    harness.turn(2)
    for name in names:
        list(table.unload(name))
    harness.drain()
    harness.turn()
    assert (table.num_bytes, group.allocator.num_pages) == (0, pages)
    assert harness.loop.limits.groups[0].num_pages == pages  # which callers' threads go by
    assert not harness.loop.model.adapted


def test_base_matrices_beside_adapters_are_ignored(
    tmp_path: Path, tensors: dict[str, mx.array]
) -> None:
    """PEFT 0.21 does so with an output matrix that is not tied."""
    drawn = draw(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]},
        1,
        pattern=r"lm_head|q_proj",
    )
    folder = write_peft(tmp_path / "adapter", drawn)
    path = folder / "adapter_model.safetensors"
    arrays = dict(mx.load(str(path)))
    mx.eval(arrays)
    name = "base_model.model.lm_head.base_layer.weight"
    mx.save_safetensors(str(path), {**arrays, name: tensors["model.embed_tokens.weight"]})
    assert {module.path for module in read_adapter(folder).modules} >= {"lm_head"}
