"""`bench quality`: what is handed to mlx-lm, and (slow) a small run of all."""

from pathlib import Path

import mlx.core as mx
import pytest

from tests.bench.by_size import _cast, run
from tests.bench.convert import DEMO


def test_a_cast_changes_floats_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    arrays = {"w": mx.array([1, 2], mx.uint32), "s": mx.array([0.5, -3.0], mx.bfloat16)}
    mx.save_safetensors(str(source / "model.safetensors"), arrays)
    out = _cast(source, tmp_path / "out", mx.float32)
    found = mx.load(str(out / "model.safetensors"))
    assert (out / "config.json").read_text() == "{}"
    assert found["w"].dtype == mx.uint32
    assert found["s"].dtype == mx.float32
    assert found["s"].tolist() == [0.5, -3.0]


@pytest.mark.slow
def test_error_feedback_and_a_target_beat_mlx_lm_at_its_size() -> None:
    recipes = {r["label"]: r for r in run(model=DEMO, small=True).data["recipes"]}
    ours, nearest = recipes["--target-bpw 4.5"], recipes["--target-bpw 4.5 --rounding nearest"]
    assert ours["kl_mean"] < nearest["kl_mean"]
    theirs = [r for r in recipes.values() if r["converter"] == "mlx-lm"]
    assert theirs
    assert all(ours["kl_mean"] < r["kl_mean"] for r in theirs if r["bits_per_weight"] < 4.6)
