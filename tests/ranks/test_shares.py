"""A model that is spread over ranks gives the logits of the whole one, and each rank reads and
holds its share. Ranks are threads here; all families, and four ranks, with

    MLXINFER_ALL_RANKS=1 pytest tests/ranks/test_shares.py
"""

from itertools import pairwise, product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, prompt
from models.cases import CASES
from models.dense_kv import DenseCache
from models.picture_cases import QWEN_CASES, picture_tensors
from models.runs import every
from models.tiny import tiny_checkpoint, write
from ranks.threads import ALL, ThreadLink, results_of, run_ranks

from mlxinfer import hub
from mlxinfer.core import SamplingParams
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.layers.step import FINAL, Step, Taps
from mlxinfer.models import load, load_share, whole_tables
from mlxinfer.models.decoder import Model
from mlxinfer.models.language import LanguageModel, arrays
from mlxinfer.models.stage import StageModel, divide
from mlxinfer.models.weights.share import SPLITTABLE, Share
from mlxinfer.models.weights.tensors import FileTensor
from mlxinfer.models.weights.weights import Weights

SOME = ["qwen3-v4", "gpt_oss-v5", "deepseek_v3-v4", "qwen3_next-v4", "nemotron_h-v4", "phi3-v4"]
SOME += ["granitemoe_swa-v5", "afmoe-v4", "sarvam_mla-v4"]
SOME_STAGED = ["olmo2-v4", "gemma2-v4", "granitemoehybrid-v4", "lfm2-v4", "kimi_linear-v4"]
SOME_STAGED += ["gemma3n_text-v4", "gemma3n_text-v5", "gemma4_e-v4"]
EVERY = [case for case in CASES if CASES[case]["model_type"] in SPLITTABLE]
IDS = np.random.default_rng(0).integers(3, 90, 40).astype(np.int32)


def logits_of(model: LanguageModel) -> np.ndarray:
    caches = DenseCache(model).step([("a", len(IDS))])
    hidden = model(mx.array(IDS), Step(mx.arange(len(IDS), dtype=mx.int32), caches))
    return np.array(model.logits(hidden))


@pytest.mark.alike
@pytest.mark.parametrize("size", [2, 4] if ALL else [2])
@pytest.mark.parametrize("case", EVERY if ALL else SOME)
def test_ranks_give_the_logits_of_the_whole_model(case, size, tmp_path, monkeypatch):
    folder = tiny_checkpoint(tmp_path, case)
    whole = load(folder)
    expected = logits_of(whole)
    readers: list[Weights] = []
    plain_init = Weights.__init__

    def remember(self: Weights, *args: object, **kwargs: object) -> None:
        plain_init(self, *args, **kwargs)  # type: ignore[arg-type]
        readers.append(self)

    monkeypatch.setattr(Weights, "__init__", remember)

    def work(link: ThreadLink) -> tuple[np.ndarray, list[str], Model]:
        model = load_share(folder, link.rank, link)
        return logits_of(model), link.calls, model

    results = results_of(size, work)
    logits, *_ = results[0]  # which alone samples
    assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, float(expected.std()))
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
    for _, calls, model in results:
        num_blocks = sum(
            (getattr(layer, "mixer", None) is not None) + (getattr(layer, "mlp", None) is not None)
            for layer in model.layers
        )
        assert calls.count("sum of layers") <= num_blocks
        assert calls.count("sum of embedding") == 1
        assert calls.count("gather") == 1
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for reader in readers:
        assert reader.bytes_read <= stored / size * 1.35, "of vectors each has all"


@pytest.mark.parametrize("pipeline", [False, True])
def test_rank_0_has_what_sees_pictures(pipeline, tmp_path):
    config, tensors = QWEN_CASES["qwen3_vl"].config, picture_tensors("qwen3_vl")
    folder = write(tmp_path / "whole", config, tensors)
    text = {name: value for name, value in tensors.items() if "visual." not in name}
    blind = write(tmp_path / "text", config, text)
    seeing = sum(value.nbytes for name, value in tensors.items() if name not in text)
    read: dict[tuple[Path, int], int] = {}

    def work(link: ThreadLink) -> list[Model | StageModel]:
        return [
            load_share(
                item, link.rank, link, pipeline=pipeline,
                read=lambda count, item=item: read.update({(item, link.rank): count}),
            )
            for item in (folder, blind)
        ]  # fmt: skip

    whole = load(folder)
    for rank, (sees, other) in enumerate(run_ranks(2, work)):
        more = 0 if rank else seeing
        assert sees.num_bytes - other.num_bytes == more
        assert read[folder, rank] - read[blind, rank] == more
        assert (sees.tower is None) == (rank > 0)
        assert sees.rope_axes == 3
    first = run_ranks(2, work)[0][0]
    pairs = zip(first.tower.arrays(), whole.tower.arrays(), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.alike
@pytest.mark.parametrize("size", [2, 3] if ALL else [2])
@pytest.mark.parametrize("case", CASES if ALL else SOME_STAGED)
def test_stages_give_the_logits_of_the_whole_model(case, size, tmp_path):
    """Bit for bit: each layer is computed as it is on one rank. And each has its layers alone."""
    folder = tiny_checkpoint(tmp_path, case)
    whole = load(folder)
    expected = logits_of(whole)
    read: list[int] = []

    def work(link: ThreadLink) -> tuple[np.ndarray, list[str], StageModel]:
        model = load_share(folder, link.rank, link, pipeline=True, read=read.append)
        assert isinstance(model, StageModel)
        return logits_of(model), link.calls, model

    results = results_of(size, work)
    assert (results[0][0] == expected).all()
    assert all(calls == ["send"] for _, calls, _ in results)
    held = [model.num_bytes for *_, model in results]
    twice = sum(held) - whole.num_bytes  # the last norm, and frequencies of ropes
    assert 0 <= twice <= 2000 * (size - 1)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert sum(read) <= 1.01 * stored
    assert 0.95 * stored <= results[0][2].all_bytes <= stored


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "size"), [("lfm2-v4", 2), ("lfm2-v4", 4), ("gemma3n_text-v5", 3), ("gemma4_e-v4", 2)]
)
def test_hidden_states_of_any_layer_come_back_from_stages(case, size, tmp_path):
    """Bit for bit, in one array that goes round; ranks send it, and nothing else."""
    folder = tiny_checkpoint(tmp_path, case)
    whole = load(folder)
    last = whole.config.num_layers - 1

    def tapped(model: LanguageModel, wanted: list[int]) -> tuple[np.ndarray, Taps]:
        taps, positions = Taps(wanted), mx.arange(len(IDS), dtype=mx.int32)
        caches = DenseCache(model).step([("a", len(IDS))])
        hidden = model(mx.array(IDS), Step(positions, caches, taps=taps))
        mx.eval(list(taps._states.values()))  # on the thread of this rank
        return np.array(model.logits(hidden[5:8])), taps

    for wanted in [[FINAL], [*range(last + 1)], [last, 0, 1], [0]]:
        logits, taps = tapped(whole, wanted)

        def work(
            link: ThreadLink, wanted: list[int] = wanted
        ) -> tuple[np.ndarray, Taps, list[str]]:
            actual = tapped(load_share(folder, link.rank, link, pipeline=True), wanted)
            return *actual, link.calls

        results = run_ranks(size, work)
        assert (results[0][0] == logits).all()
        assert mx.array_equal(results[0][1].joined(), taps.joined())
        assert all(calls == ["send"] for *_, calls in results)


@pytest.mark.parametrize("case", ["qwen3-v4", "gemma2-v4", "deepseek_v3-v4", "demo"])
def test_rank_0_reads_whole_tables_for_a_head(case, tmp_path):
    """What a head shares with a model of which each rank has a part of every layer."""
    folder = hub.resolve("demo") if case == "demo" else tiny_checkpoint(tmp_path, case)
    whole = load(folder)
    part = run_ranks(2, lambda link: load_share(folder, link.rank, link))[0]
    tables, num_bytes = whole_tables(part, folder, has_logits=True)
    hidden = mx.array(np.random.default_rng(0).normal(size=(3, whole.config.hidden_size)))
    hidden = hidden.astype(whole.activation_dtype)
    assert mx.array_equal(tables.embed(mx.array(IDS)), whole.embed(mx.array(IDS)))
    assert mx.array_equal(tables.logits(hidden), whole.logits(hidden))
    shared = [whole.embed_tokens, whole.norm]
    shared += [] if whole.config.tie_word_embeddings else [whole.lm_head]
    assert num_bytes == sum(array.nbytes for array in arrays(shared))
    bare, fewer = whole_tables(part, folder, has_logits=False)
    assert bare.lm_head is None
    assert fewer <= num_bytes
    assert whole_tables(whole, folder, has_logits=True) == (whole, 0)


def test_layers_are_divided_by_their_bytes():
    def tensor(num_bytes: int) -> FileTensor:
        return FileTensor("U8", (num_bytes,), [])

    sizes = [10, 10, 30, 10, 10, 10]
    tensors = {f"model.layers.{i}.x": tensor(size) for i, size in enumerate(sizes)}
    tensors |= {"model.embed_tokens.weight": tensor(25), "model.layers.6.eh_proj": tensor(99)}
    ranges = divide(tensors, lambda name: name, 6, 3)
    assert ranges == [range(1), range(1, 3), range(3, 6)]
    with pytest.raises(UnsupportedModelError, match="6 ranks at most"):
        divide(tensors, lambda name: name, 6, 7)


def test_layers_that_read_what_others_left_stay_with_them():
    tensors = {f"model.layers.{i}.x": FileTensor("U8", (10,), []) for i in range(6)}
    ranges = divide(tensors, lambda name: name, 6, 2, bound=frozenset({2, 3, 4, 5}))
    assert ranges == [range(1), range(1, 6)]
    with pytest.raises(UnsupportedModelError, match=r"4 of which stay .* 2 ranks at most"):
        divide(tensors, lambda name: name, 6, 3, bound=frozenset({2, 3, 4, 5}))
    assert divide(tensors, lambda name: name, 6, 3, bound=frozenset({2, 4})) == [
        range(1),
        range(1, 3),
        range(3, 6),
    ]


@pytest.mark.parametrize("case", every(2, ["qwen2-v5", "demo"]))
def test_quantised_columns_are_cut_between_groups(case, tmp_path):
    """Three groups for two ranks: one has two of them. And no format is read off a part of a
    matrix: half the inputs of 4 bits in groups of 64 look like 8 bits in groups of 32 (demo).
    """
    how = {"group_size": 32, "bits": 4}
    folder = (
        hub.resolve("demo") if case == "demo" else tiny_checkpoint(tmp_path, case, quantize=how)
    )
    expected = logits_of(load(folder))
    logits, _ = run_ranks(2, lambda link: logits_of(load_share(folder, link.rank, link)))
    assert np.abs(logits - expected).max() <= 1e-4 * max(1.0, float(expected.std()))


def test_the_spans_of_all_ranks_cover_everything_once():
    for size, count in product([1, 2, 3, 4, 7], [7, 8, 45, 90]):
        spans = [Share(rank, size).span(count) for rank in range(size)]
        assert [spans[0][0], spans[-1][1]] == [0, count]
        assert all(before[1] == after[0] for before, after in pairwise(spans)), spans
        sizes = [stop - start for start, stop in spans]
        assert max(sizes) - min(sizes) <= 1, spans


@pytest.mark.parametrize(
    ("case", "says"), [("olmo2-v4", "cannot be spread"), ("nemotron_h-v5", "mamba_n_groups is 1")]
)
def test_what_cannot_be_shared_is_refused_by_name(case, says, tmp_path):
    folder = tiny_checkpoint(tmp_path, case)
    with pytest.raises(UnsupportedModelError, match=says):
        run_ranks(2, lambda link: load_share(folder, link.rank, link))


class FirstLink:
    """Of rank 0 of two; what the other one would send is zeros."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def send(self, x: mx.array) -> mx.array:
        self.calls.append(("send", len(x)))
        return x

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        self.calls.append(("receive", shape[0]))
        return mx.zeros(shape, dtype)


def test_chunks_of_a_prompt_stream_through_stages(tmp_path):
    """Rank 0 goes on to the next chunk without a word from the last rank, but for the last one.

    And of that, one row comes back.
    """
    link = FirstLink()
    model = load_share(tiny_checkpoint(tmp_path, "llama-v4"), 0, link, pipeline=True)
    harness = Harness(model, prefill_chunk=16)
    harness.run("a", prompt(80), SamplingParams(max_tokens=1))
    assert link.calls == [("send", 16)] * 5 + [("receive", 1)]
