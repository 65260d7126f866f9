"""Bonsai 2: packed matrices in a rotated basis give what the plain matrices would."""

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from models.bonsai import pack
from models.dense_kv import DenseCache
from models.picture_cases import QWEN_CASES, picture_tensors
from models.tiny import write
from pooling.tiny_pooling import write_tokenizer

from mlxinfer import LLM
from mlxinfer.cli._commands import cli
from mlxinfer.errors import CheckpointError, UnsupportedModelError
from mlxinfer.layers.linear import Joined, RotatedLinear
from mlxinfer.models import load

IDS = [5, 9, 77, 3, 41, 8, 60, 2, 11, 90, 33, 7, 15, 54, 29, 88, 1, 70]


def close(actual: mx.array, expected: mx.array, tolerance: float) -> None:
    ours, theirs = np.array(actual), np.array(expected)
    assert np.abs(ours - theirs).max() <= tolerance * max(1.0, theirs.std())


def tokens_of(folder, speculate: str) -> list[list[int]]:
    """Two prompts at once, then again, from what the first time left."""
    with LLM(folder, speculate=speculate) as llm:
        answers = [
            answer
            for _ in range(2)
            for answer in llm.generate([IDS, IDS[:9]], max_tokens=12, temperature=0)
        ]
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    config, packed, plain = pack()
    folder = tmp_path_factory.mktemp("bonsai")
    whole = {**config, "model_type": "qwen3_5"}
    del whole["quantization"]
    both = write(folder / "pack", config, packed), write(folder / "plain", whole, plain)
    for one in both:
        write_tokenizer(one, config["text_config"]["vocab_size"])
    return both


def test_a_pack_has_the_logits_of_its_plain_matrices(folders):
    """In one piece, in chunks and in steps beside another sequence."""
    model, plain = (load(folder) for folder in folders)
    expected = DenseCache(plain).run(plain, [("a", IDS)])
    close(DenseCache(model).run(model, [("a", IDS)]), expected, 1e-4)
    cache = DenseCache(model)
    cache.run(model, [("b", IDS[:5])])
    parts = [cache.run(model, [("a", IDS[:7])])]
    both = [[("a", [token]), ("b", [token])] for token in IDS[7:]]
    parts += [cache.run(model, pair)[:1] for pair in both]
    close(mx.concatenate(parts), expected, 1e-4)


def test_matrices_of_one_input_are_rotated_once(folders):
    model = load(folders[0])
    recurrent, attention = model.layers[0], model.layers[1]
    mlps = [recurrent.mlp.gate_up_proj, attention.mlp.gate_up_proj]
    fused = [attention.mixer.args.qkv_proj, *mlps]
    assert all(isinstance(projection, RotatedLinear) for projection in fused)
    in_proj = recurrent.mixer.in_proj
    assert isinstance(in_proj, Joined)  # two of its four matrices are not packed
    assert [isinstance(part, RotatedLinear) for part in in_proj.parts] == [True, False]


def test_tokens_are_those_of_mlx_lm(folders):
    """In float16, as its definition computes."""
    from mlx_lm.utils import load_model

    theirs = load_model(folders[0])[0]
    logits = theirs(mx.array([IDS]))[0].astype(mx.float32)
    model = load(folders[0], dtype="float16")
    ours = DenseCache(model).run(model, [("a", IDS)]).astype(mx.float32)
    close(ours, logits, 2e-2)
    assert (np.array(ours).argmax(-1) == np.array(logits).argmax(-1)).mean() > 0.9


def test_it_runs_batched_with_a_prefix_cache_and_speculation(folders):
    expected = tokens_of(folders[1], "off")
    assert tokens_of(folders[0], "ngram") == expected


@pytest.mark.alike
@pytest.mark.parametrize(
    ("key", "value"), [("schema_version", 3), ("tensor_namespace", "x"), ("modules", [])]
)
def test_other_packs_are_refused(tmp_path, key, value):
    config, packed, _ = pack()
    with pytest.raises((CheckpointError, UnsupportedModelError), match=key):
        load(write(tmp_path, {**config, key: value}, packed))


def test_signs_that_are_none_are_refused(tmp_path):
    config, packed, _ = pack()
    name = "language_model.model.layers.0.mlp.up_proj.signs"
    with pytest.raises(CheckpointError, match="1 and -1"):
        load(write(tmp_path / "a", config, {**packed, name: packed[name] * 2}))
    del packed[name]
    with pytest.raises(CheckpointError, match="signs"):
        load(write(tmp_path / "b", config, packed))


def test_a_pack_runs_as_it_is_and_is_not_converted(folders, tmp_path):
    result = CliRunner().invoke(cli, ["convert", str(folders[0]), str(tmp_path / "out")])
    assert result.exit_code
    assert "they run as they are" in str(result.exception)


def test_a_pack_has_the_tower_of_qwen_3_5(tmp_path):
    config, packed, _ = pack()
    case = picture_tensors("qwen3_5")
    vision = {**QWEN_CASES["qwen3_5"].config["vision_config"], "out_hidden_size": 512}
    seeing = {name: value for name, value in case.items() if "visual." in name}
    wide = {
        name: np.resize(value, (512, *value.shape[1:])) if "merger.linear_fc2" in name else value
        for name, value in seeing.items()
    }
    ids = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92}
    whole = {**config, **ids, "vision_config": vision}
    model = load(write(tmp_path, whole, {**packed, **wide}))
    assert model.tower is not None
