"""--explore: predicted sizes and divergences, checked against what conversions really have."""

import json
import math
from pathlib import Path

import pytest
from convert_cases import TEXT, Outcome, contents, convert, write_source
from test_convert_run import open_logits

from mlxinfer.convert.explore import explore
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.convert.sizes import SizePoint
from mlxinfer.errors import ConversionError, InvalidRequestError


@pytest.fixture(autouse=True)
def reachable_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiny models norms and scales weigh more."""
    monkeypatch.setattr("mlxinfer.convert.sizes.TARGETS", (1.0, 6.0, 7.0, 8.0))
    checked = ("--target-bpw 6", "--target-bpw 7")
    monkeypatch.setattr("mlxinfer.convert.explore.CHECKED", checked)


def explored(source: Path, out: Path, recipe: str = "4bit", **options: object) -> list[SizePoint]:
    made = ConversionOptions(recipe=make_recipe(recipe), calibration=TEXT, **options)  # type: ignore[arg-type]
    return explore(Conversion(open_source(source), out, made))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("llama-v4", marks=pytest.mark.slow),
        "qwen3_moe-v4",
        pytest.param("gemma3_text-v4", marks=pytest.mark.slow),
        pytest.param("gpt_oss-v4", marks=pytest.mark.slow),
    ],
)
def test_what_is_measured_is_what_a_conversion_has(tmp_path: Path, case: str) -> None:
    """Sizes exactly; the divergence up to the engine's other order of sums."""
    source = write_source(tmp_path / "source", case)
    points = explored(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [source], "nothing is written"
    assert [p.num_bytes for p in points] == sorted(p.num_bytes for p in points)
    assert "--target-bpw 1" not in [p.label for p in points], "no formats are so small"
    for point in points:
        assert math.isfinite(point.kl)
        if point.measured_kl is None:
            continue
        target = float(point.label.removeprefix("--target-bpw "))
        assert point.bits_per_weight <= target
        report = convert(
            source, tmp_path / point.label, "4bit", calibration=TEXT, target_bpw=target,
            open_model=open_logits,
        )  # fmt: skip
        assert report.num_bytes == point.num_bytes
        assert point.measured_kl == pytest.approx(report.logits[0].kl_mean, rel=0.02, abs=1e-7)


def test_predictions_are_near_what_is_measured_and_fall_with_size(tmp_path: Path) -> None:
    points = explored(write_source(tmp_path / "source", "llama-v4"), tmp_path / "out")
    targets = [point for point in points if point.label.startswith("--target")]
    assert [point.kl for point in targets] == sorted((p.kl for p in targets), reverse=True)
    for point in targets:
        if point.measured_kl is not None:
            assert point.kl == pytest.approx(point.measured_kl, rel=0.7)
    for point in points:  # no uniform format is better than a target of its size or less
        smaller = [t.kl for t in targets if t.num_bytes >= point.num_bytes]
        assert all(kl <= point.kl * 1.001 for kl in smaller[:1])


def test_exploring_needs_a_text_and_a_tokenizer(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    options = ConversionOptions(recipe=make_recipe("4bit"))
    with pytest.raises(InvalidRequestError, match="calibration"):
        explore(Conversion(open_source(source), tmp_path / "out", options))
    (source / "tokenizer.json").unlink()
    with pytest.raises(ConversionError, match="no tokenizer"):
        explored(source, tmp_path / "out")


def test_the_command_prints_a_table_and_converts_nothing(tmp_path: Path, outcome: Outcome) -> None:
    source, text = write_source(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text(TEXT[:150])
    command = (source, tmp_path / "out", "--explore", "--calibration", text)
    before = contents(source)
    seen = outcome(*command)
    assert seen.code == 0, seen.err
    assert "--target-bpw 6 " in seen.out
    assert "KL measured" in seen.out
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert contents(source) == before
    points = json.loads(outcome(*command, "--json").out)["points"]
    assert {"label", "bits_per_weight", "num_bytes", "kl", "measured_kl"} == set(points[0])
    for wrong in (("--bits", 4), ("--resume",), ("--target-bpw", 4), ("--upload", "a/b")):
        refused = outcome(*command, *wrong)
        assert refused.code == 2
        assert "--explore converts nothing" in refused.err
    assert outcome(*command, "--dry-run").code == 2
