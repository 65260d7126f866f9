"""`mlxinfer doctor --kernels`: on a GPU, and where there is none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest

from mlxinfer.cli import _kernels
from mlxinfer.cli.doctor import OK, WARN, judge_kernels, kernels
from mlxinfer.layers.recurrence_check import DeltaShape
from mlxinfer.metal_kernels import launch
from mlxinfer.metal_kernels.attention_cases import PAIRS, has_pairs
from mlxinfer.metal_kernels.selfcheck import KINDS, Gpu, Verdict, Verdicts, key_of, thread_limits

TIMED_HEADER = ["VARIANT", "VERDICT", "ERROR", "ALLOWED", "SPEED"]


def use_gpu(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    fault: fake_gpu.Fault | None = None,
    kernel_s: float = 1e-5,
) -> None:
    """Have a GPU without verdicts of earlier runs, and one small kernel with two variants."""
    kind = KINDS["bitmask"]
    monkeypatch.setattr(_kernels, "KINDS", {"bitmask": replace(kind, samples=kind.samples[:2])})
    monkeypatch.setattr(_kernels, "SHAPES", ())
    monkeypatch.setattr(_kernels, "this_gpu", lambda: fake_gpu.gpu(fault, kernel_s=kernel_s)[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_on_a_gpu_kernels_are_timed_and_the_report_is_kept(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_gpu(monkeypatch, tmp_path)
    seen = outcome("doctor", "--kernels")
    assert seen.code == 0
    lines = seen.out.splitlines()
    assert lines[0].startswith(fake_gpu.CHIP)
    assert lines[1].split() == TIMED_HEADER
    assert lines[2].startswith("bitmask dtype=float32   ok")
    kept = json.loads((tmp_path / "mlxinfer" / "kernels" / "report.json").read_text())
    assert [row["status"] for row in kept["kernels"]] == ["ok", "ok"]
    assert all(row["speed"] == pytest.approx(2) for row in kept["kernels"])
    for row in kept["kernels"]:
        assert set(row["times_us"]) == set(row["errors"]) == {"1 x 0", "8 x 0"}
        assert row["used"] == {"1": "kernel", "8": "kernel"}
        assert row["instead"] == {"1": "MLX", "8": "MLX"}
    assert (
        "bitmask dtype=float32: 1 x 0: kernel 10 us, MLX 20 us; 8 x 0: kernel 10 us, MLX 20 us"
        in lines
    )


def test_a_kernel_slower_than_mlx_is_said_to_be_unused(
    outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_gpu(monkeypatch, tmp_path, kernel_s=2e-5)
    store = Verdicts(tmp_path / "mlxinfer" / "kernels", fake_gpu.CHIP)
    text = key_of(fake_gpu.BITMASK).partition("#")[2]
    with store.exclusively():
        store.put(
            f"bitmask dtype=of-a-model #{text}",
            Verdict("ok", times={"1 x 0": {"kernel": 1e-6, "MLX": 3e-6}}),
        )
        store.put("bitmask dtype=before #1", Verdict("ok"))
    seen = outcome("doctor", "--kernels")
    assert seen.code == 0
    rows = seen.out.splitlines()[2:5]
    dtypes = [row.split()[1].removeprefix("dtype=") for row in rows]
    assert dtypes == ["float32", "bfloat16", "of-a-model"]
    assert [row.endswith("1, not used") for row in rows] == [True, True, False]


@pytest.mark.parametrize(
    ("fault", "said"),
    [(fake_gpu.lies, "wrong"), (fake_gpu.does_not_compile, "Unable to build metal library")],
)
def test_exit_code_1_where_a_kernel_is_at_fault(
    fault: fake_gpu.Fault, said: str, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_gpu(monkeypatch, tmp_path, fault)
    seen = outcome("doctor", "--kernels")
    assert seen.code == 1
    assert said in seen.out
    report = outcome.json("doctor", "--kernels")
    assert not report["ok"]
    assert set(report) == {"ok", "about", "kernels"}
    assert report["kernels"][0]["speed"] is None


def test_the_gated_delta_recurrence_of_mlx_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "SHAPES", (DeltaShape(1, 8, 2, 8, 3),))
    (row,) = _kernels.recurrence_rows()
    assert row.variant == "gated_delta_update (1, 8) (2, 8) 3 tokens bfloat16"
    assert (row.status, row.error) == ("ok", 0)
    monkeypatch.setattr(_kernels, "difference", lambda shape: 0.5)
    (row,) = _kernels.recurrence_rows()
    assert row.status == "differs"
    assert "single steps" in row.detail


def test_without_metal_nothing_is_run(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "this_gpu", lambda: None)
    seen = outcome("doctor", "--kernels")
    assert (seen.code, "no Metal here" in seen.out) == (0, True)


def test_doctor_alone_tells_what_self_checks_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"bitmask dtype=float16 #1": Verdict("wrong"), "sample #2": Verdict("ok")}
    check = judge_kernels(result)
    assert (check.status, check.advice) == (WARN, "mlxinfer doctor --kernels")
    assert "1 of 2: bitmask (wrong)" in check.detail
    assert judge_kernels({"sample #2": Verdict("ok")}).status == OK
    slow = judge_kernels({"sample #2": Verdict("ok", times={"1 x 0": {"kernel": 1.0, "MLX": 1.0}})})
    assert (slow.status, "MLX is as fast as 1" in slow.detail) == (OK, True)
    assert (
        "bitmask (its check crashed, or is under way)" in judge_kernels({}, ["bitmask #1"]).detail
    )
    assert "not checked yet" in judge_kernels({}).detail
    fine = Gpu(fake_gpu.FakeDevice(), fake_gpu.CHIP)
    monkeypatch.setattr("mlxinfer.metal_kernels.selfcheck.this_gpu", lambda: fine)
    assert kernels().name == "kernels"


@pytest.mark.parametrize(
    ("message", "limits"),
    [
        (
            "Thread group size (1025) is greater than  the maximum allowed threads per threadgroup "
            "(832).",
            {"paged_attention": 832, "attention_reduce": 832},
        ),
        ("[metal_kernel] No Metal back-end.", {}),
    ],
)
def test_how_many_threads_a_compiler_leaves_room_for(
    message: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both forms of the kernel; nothing is declared, and nothing run.

    Launches that are kept for other tests have MLX's function.
    """
    plain, asked = launch.compiled, []

    def refuse(**call: Any) -> None:
        asked.append(call)
        raise ValueError(message)

    def compiled(kernel: Any, template: Any, num_threads: int) -> Any:
        return plain(kernel, template, num_threads) if num_threads else refuse

    monkeypatch.setattr(launch, "compiled", compiled)
    of_pairs = {f"{name}, {PAIRS}": limit for name, limit in limits.items()}
    variant = KINDS["paged_attention"].samples[0]
    assert KINDS["paged_attention"].accumulators(variant) == 16
    assert thread_limits(variant) == limits | of_pairs
    assert asked
    assert all(call["threadgroup"] == call["grid"] == (1025, 1, 1) for call in asked)


def test_a_twice_as_large_sample_has_twice_the_sums() -> None:
    kind = KINDS["paged_attention"]
    assert [kind.accumulators(kind.samples[i]) for i in (0, -1)] == [16, 32]
    assert has_pairs(kind.samples[0])
    assert has_pairs(kind.samples[-1])
