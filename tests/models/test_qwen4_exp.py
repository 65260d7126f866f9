"""Qwen 3.8 Flash Next: the table of n-grams in its files, and the layouts of its checkpoints."""

import mlx.core as mx
import numpy as np
import pytest
from models.dense_kv import DenseCache, logits
from models.expert_layouts import stacked
from models.random_weights import tiny_tensors
from models.tiny import quantized, tiny_config, write

from mlxinfer import convert_model
from mlxinfer.errors import CheckpointError
from mlxinfer.layers.ngrams import NgramHash
from mlxinfer.memory import weights_bytes
from mlxinfer.memory.fit import held_bytes
from mlxinfer.models import load

CASE = "qwen4_exp_text-v4"
WIDE = {**tiny_config(CASE), "ple_embed_dim": 128, "heads_per_ngram": 2}  # rows of 32 numbers
ROWS = 4  # of a token
END = 2


def tensors_of(config):
    """Every tensor of a checkpoint; those of n-grams as wide as the config says."""
    result = tiny_tensors(tiny_config(CASE))
    rng = np.random.default_rng(0)
    for name, value in result.items():
        if "ngram_embedding.shard" in name:
            result[name] = rng.normal(size=(len(value), 32)).astype(np.float32)
        elif name.endswith(("ple.key_proj.weight", "ple.value_proj.weight")):
            result[name] = rng.normal(size=(len(value), config["ple_embed_dim"])).astype(np.float32)
    return result


def ngrams_of(model):
    return next(layer.inject for layer in model.layers if layer.inject is not None)


def as_on_the_hub(tensors):
    """Beside a tower, and with a head that predicts tokens further ahead."""
    by_name = {name.replace("model.", "model.language_model.", 1): v for name, v in tensors.items()}
    more = {"model.visual.patch_embed.proj.weight": (4, 4), "mtp.fc.weight": (4, 4)}
    return by_name | {name: np.zeros(shape, np.float32) for name, shape in more.items()}


def as_mlx(tensors):
    """As mlx-vlm writes it: channels last, stacks of experts, numbered parts of the table.

    Norm weights stay less one.
    """
    moved = {}
    for name, value in tensors.items():
        array = mx.array(value).moveaxis(2, 1) if "conv1d" in name else mx.array(value)
        moved[f"language_model.{name.replace('embedding.shard_', 'embedding.shards.')}"] = array
    return stacked(moved)


def test_the_names_of_the_hub_and_of_mlx(tmp_path):
    tensors = tensors_of(WIDE)
    plain = load(write(tmp_path / "plain", WIDE, tensors))
    wrapper = {"model_type": "qwen4_exp", "text_config": WIDE, "vision_config": {"depth": 1}}
    hub = load(write(tmp_path / "hub", wrapper, as_on_the_hub(tensors)))
    np.testing.assert_array_equal(logits(hub), logits(plain))
    moved = as_mlx(tensors)
    assert any("shards.3" in name for name in moved)
    of_mlx = load(write(tmp_path / "mlx", wrapper, moved))
    np.testing.assert_allclose(logits(of_mlx), logits(plain), atol=1e-4)


def test_a_quantised_table_is_read_as_its_rows_are(tmp_path):
    how = {"group_size": 32, "bits": 4}
    tensors = tensors_of(WIDE)
    packed = quantized({name: mx.array(value) for name, value in tensors.items()}, how)
    model = load(write(tmp_path, {**WIDE, "quantization": how}, packed))
    table, path = ngrams_of(model).table, "model.layers.0.ple.ple_embedding.ngram_embedding"
    whole = mx.concatenate(
        [
            mx.dequantize(
                *[packed[f"{path}.shard_{i}.{n}"] for n in ("weight", "scales", "biases")], **how
            )
            for i in range(4)
        ]
    )
    rows = np.array([0, 29, 30, 61, 119, 30, *range(0, 120, 1)])  # ends of parts, and one twice
    memory = bytearray(len(rows) * table.row_bytes)
    table.read(rows, memoryview(memory))
    stored = mx.array(np.frombuffer(memory, np.uint8).reshape(len(rows), -1))
    assert table.row_bytes == 32 * 4 // 8 + 2 * whole.dtype.size
    np.testing.assert_array_equal(np.array(table.decode(stored)), np.array(whole)[rows])


def test_the_table_is_not_in_memory(tmp_path):
    """A token reads its rows, a row that several tokens of a step name is read once."""
    folder = write(tmp_path, WIDE, tensors_of(WIDE))
    model = load(folder)
    table = ngrams_of(model).table
    all_bytes = 120 * 32 * 4
    assert weights_bytes(folder) - held_bytes(folder) == all_bytes
    in_memory = sum(
        v.nbytes for n, v in tensors_of(WIDE).items() if "ngram_embedding.shard" not in n
    )
    assert model.num_bytes < in_memory + all_bytes // 2
    cache = DenseCache(model)
    cache.run(model, [("a", [5, 6, 7])])
    before = table.rows_read
    assert before <= 3 * ROWS
    for token in (8, 9, 10):
        cache.run(model, [("a", [token])])
    assert table.rows_read - before <= 3 * ROWS
    cache.run(model, [("b", [5]), ("c", [5])])  # the same n-grams
    assert table.rows_read - before <= 4 * ROWS


def test_an_end_token_hides_what_is_before_it():
    multipliers, sizes = np.array([3, 5, 7]), np.array([[11, 13], [17, 19]])
    offsets = np.array([[0, 11], [24, 41]])
    hashing = NgramHash(multipliers, sizes, offsets, END)

    def rows(*ids):
        """Of the first token, by hand."""
        two = ids[0] * 3 ^ ids[1] * 5
        three = two ^ ids[2] * 7
        return [two % 11, two % 13 + 11, three % 17 + 24, three % 19 + 41]

    windows = np.array([[9, 8, 7], [9, END, 7], [END, 8, 7], [9, 8, END], [9, -1, -1]]) + 1
    expected = [[9, 8, 7], [9, END, END], [END, 8, 7], [9, 8, END], [9, END, END]]
    assert hashing(windows.astype(np.int32)).tolist() == [rows(*ids) for ids in expected]


def test_rows_behind_the_table_are_refused(tmp_path):
    tensors = tensors_of(WIDE)
    path = "model.layers.0.ple.ple_embedding.ngram_heads_offsets"
    tensors[path] = tensors[path] + 100
    with pytest.raises(CheckpointError, match="table of 120 rows"):
        load(write(tmp_path, WIDE, tensors))


def test_an_index_leaves_tokens_out(tmp_path):
    """Up to three blocks of four tokens and an open one, all are seen; then some are not."""
    few, all_of_them = (
        logits(
            load(
                write(tmp_path / str(budget), {**WIDE, "indexer_budget": budget}, tensors_of(WIDE))
            )
        )
        for budget in (12, 40)
    )
    np.testing.assert_allclose(few[:15], all_of_them[:15], atol=1e-5)
    assert (np.abs(few[15:] - all_of_them[15:]).max(axis=1) > 1e-3).mean() > 0.8


@pytest.mark.ci
def test_a_conversion_keeps_whole_numbers_and_the_parts_of_the_table(tmp_path):
    folder, how = (
        write(tmp_path / "source", WIDE, tensors_of(WIDE)),
        {"calibration": None, "check": False},
    )
    source = load(folder)
    convert_model(folder, tmp_path / "dense", recipe="dense", **how, progress=False)
    np.testing.assert_array_equal(logits(load(tmp_path / "dense")), logits(source))
    convert_model(folder, tmp_path / "packed", recipe="4bit-g32", **how, progress=False)
    ours, theirs = ngrams_of(load(tmp_path / "packed")), ngrams_of(source)
    assert ours.table.form.bits == 4
    assert ours.table.num_rows == theirs.table.num_rows
    np.testing.assert_array_equal(ours.hashing.multipliers, theirs.hashing.multipliers)
