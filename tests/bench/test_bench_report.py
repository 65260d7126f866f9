from pathlib import Path

import pytest

from mlxinfer.bench import peer
from mlxinfer.bench.report import describe_machine, ratio
from mlxinfer.errors import BackendMissingError, MlxinferError
from tests.bench import host, latency, start, streams
from tests.bench.bench_parts import VOCAB, check
from tests.bench.checkpoints import LAPTOP, TWO_LAYERS, write_checkpoint
from tests.bench.processes import run_python


@pytest.mark.parametrize(
    ("theirs", "ours", "text"),
    [(3.0, 2.0, "1.50x"), (20.0, 2.0, "10.0x"), (1000.0, 2.0, "500x"), (1.0, 0.0, "-")],
)
def test_ratio(theirs: float, ours: float, text: str) -> None:
    assert ratio(theirs, ours) == text


def test_machine_says_what_a_number_needs() -> None:
    facts = describe_machine("mlxinfer bench", blas="libopenblas.so.0")
    assert set(facts) == {"command", "machine", "load", "python", "versions", "blas"}
    assert "mlx " in facts["versions"]
    assert facts["blas"] == "libopenblas.so.0"


def test_laptop_model_has_the_size_it_is_said_to_have() -> None:
    assert 54e6 < LAPTOP.num_weights < 55e6


def test_checkpoints_of_one_seed_are_equal(tmp_path: Path) -> None:
    names = ("config.json", "model.safetensors")
    folders = [write_checkpoint(tmp_path / name, TWO_LAYERS) for name in "ab"]
    first, second = ([(folder / name).read_bytes() for name in names] for folder in folders)
    assert first == second
    other = write_checkpoint(tmp_path / "c", TWO_LAYERS, seed=1)
    assert (other / names[1]).read_bytes() != first[1]


def test_without_mlx_lm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise peer.PackageNotFoundError(name)

    monkeypatch.setattr(peer, "version", missing)
    with pytest.raises(BackendMissingError, match=r"mlxinfer\[bench\]"):
        start.run(runs=1)


@pytest.mark.slow  # 20 s; its parts have tests of their own
def test_host_alone() -> None:
    report = host.run(requests=(1, 3), blocks=1, peer=False)
    decode = report.data["decode"]
    assert [entry["requests"] for entry in decode] == [1, 3]
    for entry in decode:
        assert all(set(entry[kind]) == {"mlxinfer"} for kind in ("whole", "in_kernel", "greedy"))
    check(report)


def test_latency_alone() -> None:
    report = latency.run(long=300, small=True, prefill_chunk=64, cpu_time=True, peer=False)
    found = report.data["median"]["mlxinfer"]
    assert 0 < found["short_first_s"] <= found["short_last_s"]
    assert found["short_rows"] < 300
    check(report)


def test_a_process_has_costs_and_one_that_fails_is_quoted() -> None:
    cost = run_python("-c", "sum(range(1_000_000))")
    assert min(cost.cpu_s, cost.wall_s, cost.peak_bytes) > 0
    with pytest.raises(MlxinferError, match="exited with 1: no such thing"):
        run_python("-c", "raise SystemExit('no such thing')")


def test_prompts_are_in_the_vocabulary() -> None:
    ids = latency.random_prompt(1000, VOCAB, 3)
    assert min(ids) >= 3
    assert max(ids) < VOCAB


def test_streams_alone() -> None:
    report = streams.run(runs=1, small=True, peer=False)
    assert [cell["batch"] for cell in report.data["cells"]["mlxinfer"]] == [1, 4, 8]
    check(report)
