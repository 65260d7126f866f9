"""`mlxinfer doctor`: every check is a line, a broken one too."""

from typing import Any

import mlx.core as mx
import pytest
from fake_llm import FakeLLM
from standin import StandIn

from mlxinfer.backend import BUFFER_VARIABLE, OPERATIONS_VARIABLE
from mlxinfer.cli import doctor
from mlxinfer.cli.doctor import FAIL, OK, WARN, Check, examine, judge_gpu_memory, recommended_mb


def test_exit_code_1_where_something_fails(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Check("one", OK, "fine"), Check("two", FAIL, "broken", "mend it")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: good,))
    assert outcome("doctor").code == 0
    monkeypatch.setattr(doctor, "CHECKS", (lambda: good, lambda: bad))
    seen = outcome("doctor")
    assert seen.code == 1
    assert seen.out == "ok    one: fine\nfail  two: broken\n      -> mend it\n"


def test_a_check_that_breaks_is_a_finding() -> None:
    def odd_check() -> Check:
        raise RuntimeError("boom")

    check = examine(odd_check)
    assert (check.name, check.status) == ("odd check", FAIL)
    assert "RuntimeError: boom" in check.detail


def test_a_file_that_cannot_be_read_is_no_bug() -> None:
    def token() -> Check:
        raise NotADirectoryError(20, "Not a directory", "/x/token")

    check = examine(token)
    assert (check.status, check.detail) == (FAIL, "[Errno 20] Not a directory: '/x/token'")
    assert "report" not in check.advice


def test_this_machine_can_be_examined(fake: FakeLLM, cache: Any) -> None:
    for check in doctor.CHECKS:
        result = check()
        assert result.detail
        assert result.status in (OK, WARN, FAIL)


def test_a_gpu_is_named_with_its_command_buffer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9"})
    monkeypatch.setenv(OPERATIONS_VARIABLE, "20")
    monkeypatch.delenv(BUFFER_VARIABLE, raising=False)
    result = doctor.metal()
    assert result.status == OK
    assert result.detail == "Apple M9, command buffers of 40 to 50 Mi elements, 20 operations"


def test_generation_needs_tokens(fake: FakeLLM) -> None:
    result = doctor.generation()
    assert result.status == OK
    assert "4 tokens of the demo model, 12 tok/s" in result.detail


def test_the_token_is_never_shown(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert doctor.token() == Check("hub token", OK, "present")


def test_interrupted_downloads_are_found(standin: StandIn, outcome: Any) -> None:
    standin.faults.cut_after = [1000] + [0] * 20
    outcome("pull", "org/tiny")
    result = doctor.cache()
    assert result.status == WARN
    assert "incomplete: org/tiny" in result.detail


def test_gpu_memory_limit_leaves_room_for_the_system() -> None:
    for limit_mb, total_mb, status in (
        *((0, 16_384, OK), (12_288, 16_384, OK), (16_000, 16_384, WARN)),
        (114_688, 131_072, OK),
    ):
        assert judge_gpu_memory(limit_mb, total_mb).status == status, limit_mb
    assert recommended_mb(16_384) == 12_288
    assert recommended_mb(524_288) == 524_288 - 16_384


def test_json_keys_are_stable(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: Check("one", WARN, "so so", "look"),))
    assert outcome.json("doctor") == {
        "ok": True,
        "checks": [{"name": "one", "status": "warn", "detail": "so so", "advice": "look"}],
    }
