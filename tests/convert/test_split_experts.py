"""Experts taken apart in the files of a conversion: the same model, one read for an expert."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import Outcome, convert, write_source
from models.runs import every
from models.tiny import arrays_in

from mlxinfer import LLM
from mlxinfer.models import ExpertOptions, load
from mlxinfer.models.weights.files import read_headers

IDS = [5, 17, 3, 80, 41, 9, 22, 64]


def logits(folder: Path, **options: object) -> np.ndarray:
    with LLM(folder, progress=False, dtype="float32", **options) as llm:  # type: ignore[arg-type]
        return llm.logits(IDS)


EXPERTS = ("qwen3_moe-v4", "deepseek_v3-v4", "gpt_oss-v4")
LIKE_THEM = (
    "llama4_text-v4", "granitemoehybrid-v4",
    "mixtral-v4", "lfm2_moe-v4", "mistral4-v4", "gemma4_text-v4", "nemotron_h-v5",
)  # fmt: skip
CASES = [
    *((case, "8bit-g32") for case in EXPERTS),
    ("gpt_oss-v4", "mxfp4"),
    *(pytest.param(case, "8bit-g32", marks=pytest.mark.ci) for case in LIKE_THEM),
]


@pytest.mark.alike
@pytest.mark.parametrize(("case", "recipe"), every(2, CASES))
def test_the_same_model_with_one_read_for_an_expert_and_back(
    case: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "source", case)
    for name, split in (("whole", False), ("split", True)):
        convert(source, tmp_path / name, recipe=recipe, split_experts=split)
    whole, split = tmp_path / "whole", tmp_path / "split"
    expected = logits(whole)
    assert (logits(split) == expected).all()
    assert (logits(split, expert_memory="1GB", slow_experts=True) == expected).all()
    names = [name for header in read_headers(split).values() for name in header]
    assert not [name for name in names if ".switch_" in name]
    stores = {}
    for folder in (whole, split):
        store = load(folder, experts=ExpertOptions(1 << 30)).expert_store
        first = store.layers[0]
        wanted = np.arange(2, dtype=np.int32)
        first.begin(wanted, wanted[:0])
        first.finish(wanted)
        stores[folder] = store.reader.counters
    assert stores[split].bytes_read == stores[whole].bytes_read
    assert stores[split].reads == 2 < stores[whole].reads
    convert(split, tmp_path / "again", recipe="keep")
    assert_same(whole, tmp_path / "again")


def assert_same(one: Path, other: Path) -> None:
    """Two folders hold the same tensors."""
    loaded_model = [arrays_in(folder) for folder in (one, other)]
    assert set(loaded_model[0]) == set(loaded_model[1])
    assert all(
        mx.array_equal(loaded_model[1][name], array) for name, array in loaded_model[0].items()
    )


@pytest.mark.ci
def test_mlx_lm_reads_them_where_it_stacks_quantised_experts(tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    source = write_source(tmp_path / "source", "glm4_moe-v4")
    convert(source, tmp_path / "split", recipe="8bit-g32", split_experts=True)
    model, _ = utils.load_model(tmp_path / "split")
    model.set_dtype(mx.float32)
    theirs = np.array(model(mx.array([IDS]))[0].astype(mx.float32))
    assert np.allclose(theirs, logits(tmp_path / "split"), atol=1e-3)


def test_a_model_without_single_experts_is_refused(tmp_path: Path, outcome: Outcome) -> None:
    source = write_source(tmp_path / "source", "qwen3-v4")
    done = outcome(source, tmp_path / "out", "--fast", "--split-experts")
    assert done.code != 0
    assert "leave --split-experts out" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]  # before anything is measured


@pytest.mark.alike
@pytest.mark.parametrize("recipe", ["bf16", "8bit-g32"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", ["qwen3_moe-v4", "deepseek_v3-v4", "llama-v4"])
def test_stacks_that_transformers_does_not_find_are_named(
    tmp_path: Path, case: str, split: bool, recipe: str
) -> None:
    """Quantised folders are for MLX anyway; dense ones look as if transformers read them."""
    source, is_mixture = write_source(tmp_path / "source", case), case != "llama-v4"
    report = convert(source, tmp_path / "out", recipe, split_experts=split and is_mixture)
    names = [name for header in read_headers(tmp_path / "out").values() for name in header]
    stacked = any(".switch_mlp." in name for name in names)
    assert stacked == (is_mixture and not split)
    assert any("transformers" in note for note in report.notes) == (stacked and recipe == "bf16")
