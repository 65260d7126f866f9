"""What one pass over a model finds, layer by layer, against a model that is held whole."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, contents, convert, logits, write_source
from models.puzzle import puzzle
from models.tiny import arrays_in, config_of, write

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.calibration import measure
from mlxinfer.convert.calibration.allocation import MeasuredUnit
from mlxinfer.convert.calibration.feedback import CalibrationPass, normalised
from mlxinfer.convert.calibration.measure import measure_units
from mlxinfer.convert.calibration.stream import StreamedModel
from mlxinfer.convert.calibration.texts import (
    CALIBRATION_LENGTH,
    LEAST_CHECKED,
    MAX_COMPARED,
    Texts,
    beginning,
    checked_positions,
    make_texts,
)
from mlxinfer.convert.quantise import QuantisationMethod, round_trip
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import affine, make_recipe
from mlxinfer.errors import ConversionError, InvalidRequestError

RNG = np.random.default_rng(0)
IDS = [RNG.integers(3, 90, 24).tolist() for _ in range(3)]
TEXTS = Texts(IDS, IDS[:1], IDS[1:2])
SEEING_FAR = {  # changes of configs, with which a token sees all of such a text
    "minimax_m3_vl_text-v5": {"index_topk_blocks": 64},
    "llama4_text-v5": {"attention_chunk_size": 64},
    "glm_moe_dsa-v5": {"index_topk": 512},
    "glm5_next_text-v4": {"index_topk": 512},
    "glm_moe_dsa-shared": {"index_topk": 512},
    "qwen4_exp_text-v4": {"indexer_budget": 64},
    "qwen4_exp_text-v5": {"indexer_budget": 64},
}


def calibrated(folder: Path) -> dict[str, np.ndarray | None]:
    """The importance of each matrix; logits of the first of IDS are in the file "short"."""
    arranged, files = arrange(open_source(folder)), (folder / "short", folder / "long")
    result = CalibrationPass(arranged, TEXTS, 0, calibrating=True, references=files)
    last = arranged.config.num_layers
    outputs = sorted(arranged.outputs, key=lambda o: last if o.layer is None else o.layer)
    importance = {output.path: result.of(output).importance for output in outputs}
    result.write_references()
    return importance


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[MeasuredUnit]:
    """Costs over all of IDS."""
    monkeypatch.setattr(measure, "SHARE", 1)
    arranged = arrange(open_source(folder))
    return measure_units(arranged, IDS, make_recipe("4bit"), 4, lambda done, count: None)


@pytest.mark.alike
@pytest.mark.parametrize("case", SEEING_FAR)
def test_texts_of_which_an_index_or_chunk_skips_are_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConversionError, match="--calibration none"):
        calibrated(write_source(tmp_path / "m", case))


@pytest.mark.alike
@pytest.mark.parametrize(
    "case",
    [
        *("llama-v4", "qwen3_moe-v4", "gemma3_text-v5", "gpt_oss-v4", "deepseek_v3-v4", "lfm2-v4"),
        *("cohere2-v4", "granite-v4", "mixtral-v4", "glm4-v4", "smollm3-v4", "minimax_m2-v4"),
        *("falcon_h1-v4", "starcoder2-v4", "step3p5-v4", "bailing_hybrid-v4", "mimo_v2_flash-v4"),
        *("olmo_hybrid-v4", "granitemoe_swa-v4", "laguna-v4", "xing4_0-v4", "puzzle", *SEEING_FAR),
    ],
)
def test_logits_are_the_models_own(tmp_path: Path, case: str) -> None:
    """Biases of norms, multipliers of logits, and lists of settings by layer count."""
    if case == "puzzle":
        folder = write(tmp_path / "m", *puzzle())
    else:
        folder = write_source(tmp_path / "m", case)
    config_of(folder, **SEEING_FAR.get(case, {}))
    calibrated(folder)
    actual = np.fromfile(folder / "short", np.float32)
    expected = logits(folder, IDS[0])
    assert np.abs(actual.reshape(expected.shape) - expected).max() <= 1e-4 * max(
        1.0, expected.std()
    )


def test_moments_are_those_of_what_flows_in(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "m", "qwen3_moe-v4")
    actual = {path: known for path, known in calibrated(folder).items() if known is not None}
    paths = set(actual)
    assert {"model.layers.1.mlp.switch_mlp.up_proj", "model.layers.0.self_attn.o_proj"} <= paths
    assert all(v.mean() == pytest.approx(1, rel=1e-4) for v in actual.values())
    streamed = StreamedModel(arrange(open_source(folder)))
    x = streamed.embed([token for ids in IDS for token in ids])
    weight = streamed.read_layer(0)["model.layers.0.input_layernorm.weight"]
    flowing = np.array(mx.fast.rms_norm(x, weight, streamed.config.rms_norm_eps))
    squares = (flowing**2).sum(axis=0)
    expected = squares / squares.mean()
    assert actual["model.layers.0.self_attn.q_proj"] == pytest.approx(expected, rel=1e-3)


def test_a_layer_is_built_without_a_table_of_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in its place are computed, too: with 262,144 tokens they took a gigabyte a layer."""
    streamed = StreamedModel(arrange(open_source(write_source(tmp_path / "m", "qwen3-v4"))))
    made, zeros = [], mx.zeros

    def noted(shape: int | Sequence[int], *dtype: mx.Dtype) -> mx.array:
        made.append(int(np.prod(shape)))
        return zeros(shape, *dtype)

    monkeypatch.setattr(mx, "zeros", noted)
    for index in range(streamed.config.num_layers):
        streamed.layer(index, streamed.read_layer(index))
    streamed.embed(IDS[0])
    assert made
    assert max(made) <= streamed.config.hidden_size


def whole(folder: Path) -> np.ndarray:
    return np.concatenate([logits(folder, ids) for ids in IDS]).astype(np.float64)


def kl(reference: np.ndarray, other: np.ndarray) -> float:
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (reference, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.alike
@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj", "lm_head", "embed_tokens"])
def test_costs_are_what_quantising_one_unit_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model with that one matrix changed in its file."""
    folder = write_source(tmp_path / "m", "llama-v4", dtype=mx.float32)
    report = measured(folder, monkeypatch)
    unit = next(u for u in report if name in u.outputs[0].path)
    path = unit.outputs[0].name
    tensors = arrays_in(folder)
    importance = None
    if "embed" not in name:
        importance = calibrated(folder)[unit.outputs[0].path]
    changed = round_trip(tensors[path], QuantisationMethod(unit.probe, "float32", True, importance))
    reference = whole(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), {**tensors, path: changed})
    assert unit.kl == pytest.approx(kl(reference, whole(folder)), rel=0.02)


def test_errors_fall_with_bits_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(write_source(tmp_path / "m", "llama-v4"), monkeypatch)
    assert len(report) == 3 * 6 + 2  # q, k, v, o, gate with up, down; embedding and head
    for unit in report:
        costs = [unit.cost(affine(bits, 32)) for bits in (4, 5, 6, 8)]
        assert costs == sorted(costs, reverse=True)
        assert unit.cost(unit.probe) == pytest.approx(unit.kl)
        assert unit.cost(None) == 0
    gates = [u for u in report if len(u.outputs) == 2]
    assert len(gates) == 3


@pytest.mark.ci
def test_an_interrupted_conversion_does_not_measure_again(tmp_path: Path, monkeypatch) -> None:
    source = write_source(tmp_path / "source")
    options = {"calibration": TEXT, "target_bpw": 5.5}
    convert(source, tmp_path / "undisturbed", **options)
    with monkeypatch.context() as patch:
        patch.setattr("mlxinfer.convert.run.write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", **options)
    monkeypatch.setattr("mlxinfer.convert.run.measure_units", stop)
    convert(source, tmp_path / "out", run={"resume": True}, **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def stop(*args: object) -> None:
    raise KeyboardInterrupt


def test_texts_are_cut_to_what_the_model_takes() -> None:
    texts = make_texts(
        "x" * 3000, None, lambda text: list(map(ord, text)), sequences=8, max_context=100
    )
    assert {len(s) for s in texts.calibration} == {99}
    assert {len(s) for s in texts.short} == {64}
    assert {len(s) for s in texts.long} == {99}
    with pytest.raises(InvalidRequestError, match="empty"):
        make_texts("", None, lambda text: [], sequences=8, max_context=100)


def test_sequences_begin_as_the_tokenizer_begins_them() -> None:
    def framed(text: str) -> list[int]:
        return [1, 2, *plain_ids(text), 3]

    assert beginning(plain_ids, plain_ids) == []
    begin = beginning(framed, plain_ids)
    assert begin == [1, 2]
    texts = make_texts("x" * 5000, None, plain_ids, begin=begin, sequences=8, max_context=900)
    for sequences, length in (
        (texts.calibration, CALIBRATION_LENGTH),
        (texts.short, 64),
        (texts.long, 512),
    ):
        assert [len(ids) for ids in sequences] == [length] * len(sequences)
        assert all(ids[:2] == begin and set(ids[2:]) == {ord("x")} for ids in sequences)


@pytest.mark.parametrize("vocab", [100, 32_000, 151_936, 262_144, 2_000_000])
def test_a_large_vocabulary_is_compared_at_fewer_positions(vocab: int) -> None:
    positions = checked_positions(vocab)
    texts = make_texts(
        "x" * 9000, None, plain_ids, sequences=1, max_context=9000, positions=positions
    )
    result = sum(map(len, (*texts.short, *texts.long)))
    assert positions / 2 < result <= positions
    assert result * vocab <= max(MAX_COMPARED, LEAST_CHECKED * vocab)


def plain_ids(text: str) -> list[int]:
    return list(map(ord, text))


def test_inputs_that_the_text_never_had_still_count() -> None:
    weights = normalised(np.array([0.0, 1.0, 3.0, 4.0], np.float32))
    assert weights.min() > 0
    assert weights.mean() == pytest.approx(1.0)
    assert weights[3] == pytest.approx(2.0, rel=1e-3)
    assert (normalised(np.zeros(3, np.float32)) == 1).all()
