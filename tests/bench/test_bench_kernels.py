import pytest
from metal_cpu import requires_compiler

from mlxinfer.bench.report import markdown
from tests.bench import kernels
from tests.bench.kernels import compare, run


@requires_compiler
def test_ours_beside_mlx() -> None:
    found = compare(64, group=8, queries=1, tokens=40)
    assert {bits: ours.unique for bits, ours in found.ours.items()} == {16: 1, 8: 1, 4: 1}
    shared = found.mlx["2pass_gqa"]
    assert shared is not None
    assert shared.unique == 1
    assert found.unfused[4] > 8


@requires_compiler
def test_the_report_has_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ROWS", ((4, 1),))
    monkeypatch.setattr(kernels, "LATENT_ROWS", ((16, 1),))
    monkeypatch.setattr(kernels, "LAUNCHED", ("bitmask", "routing"))
    report = run(head_dims=[128], tokens=40)
    text = markdown(report)
    assert "| 128: 4 x 1 | 1.00 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 | 1.00 |" in text
    assert "| 16 bits, 16 | 1.00 / 1.00 |" in text
    assert report.as_dict()["latent_attention"][1]["moved"]["dequantised"] == 1
    assert "| bitmask dtype=float32 |" in text
    assert [size["threads"] for size in report.as_dict()["launches"][-3:]] == [128] * 3
