"""Errors of the GPU, as MLX raises them: a step is tried again at half its size, or all ends.

The messages are those that MLX makes of Metal's (mlx/backend/metal/eval.cpp).
"""

from dataclasses import fields
from typing import Any

import pytest
from engine.harness import PAGE, Harness, prompt, tiny_model

from mlxinfer.cache.inputs import Ints
from mlxinfer.core import FinishReason, Request, SamplingParams, TokenEvent
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.engine import Engine
from mlxinfer.engine.loop import Loop
from mlxinfer.engine.runner import Launched
from mlxinfer.errors import DeviceLostError, RequestFailedError, gpu_stopped
from tests.waiting import LIMIT_S

CASE = "qwen3-v4"
FAILED = "[METAL] Command buffer execution failed: "
WATCHDOG = (
    FAILED + "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInter"
    "activity)."
)
TIMEOUT = FAILED + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
VICTIM = (
    FAILED + "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackError"
    "InnocentVictim)."
)
IGNORED = (
    FAILED + "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBuffer"
    "CallbackErrorSubmissionsIgnored)."
)
FAULT = FAILED + "Page Fault (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)."
PARAMS = SamplingParams(max_tokens=9, temperature=0.8, seed=3)


class Stopped(Launched):
    """A step that the GPU did not finish."""

    message = WATCHDOG

    def token_ids(self) -> Ints:
        raise RuntimeError(self.message)


class FakeGpu:
    """Stops steps with too many prompt tokens, or those that are named, and notes all sizes."""

    def __init__(
        self, harness: Harness, message: str, *, most: int = 1 << 30, steps: tuple[int, ...] = ()
    ) -> None:
        self._launch, self._steps, self._most = harness.loop.runner.launch, steps, most
        self._kind = type("Stopped", (Stopped,), {"message": message, "__slots__": ()})
        self.sizes: list[int] = []
        harness.loop.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch, previous: Launched | None) -> Launched:
        launched = self._launch(batch, previous)
        self.sizes.append(sum(segment.num_tokens for segment in batch.ragged))
        if len(self.sizes) not in self._steps and self.sizes[-1] <= self._most:
            return launched
        parts: dict[str, Any] = {f.name: getattr(launched, f.name) for f in fields(launched)}
        return self._kind(**parts)  # type: ignore[no-any-return]


@pytest.mark.alike
@pytest.mark.parametrize("message", [WATCHDOG, TIMEOUT, VICTIM])
@pytest.mark.parametrize("timed", [False, True])
def test_a_stopped_step_is_tried_again_at_half_its_size(message: str, timed: bool) -> None:
    model = tiny_model(CASE, quantized=True)
    harness = Harness(model, prefill_slice_s=0.25 if timed else None, prefill_chunk=128)
    gpu = FakeGpu(harness, message, most=100)
    harness.add("long", prompt(500), PARAMS)
    assert harness.check()["long"].error is None
    stopped = next(i for i, size in enumerate(gpu.sizes) if size > 100)
    again = gpu.sizes[stopped + 1 :]
    assert max(again) <= gpu.sizes[stopped] // 2
    assert sum(again) == 500, "from the start"
    assert harness.loop.stats()["step_failures"] == 1


@pytest.mark.alike
@pytest.mark.parametrize("step", [1, 3, 6, 9])
def test_all_requests_of_a_stopped_step_go_on(step: int) -> None:
    """In a step of prompts, of answers or of both; with the tokens that they would have."""
    harness = Harness(tiny_model(CASE, quantized=True), max_batch=3)
    FakeGpu(harness, VICTIM, steps=(step,))
    for i in range(4):
        harness.add(str(i), prompt(20 + 30 * i), PARAMS)
        harness.turn()
    assert {outcome.error for outcome in harness.check().values()} == {None}


def test_a_request_that_is_stopped_twice_fails_alone() -> None:
    harness = Harness(tiny_model(CASE, quantized=True), prefill_chunk=64)
    gpu = FakeGpu(harness, WATCHDOG, most=PAGE - 1)
    failed = harness.run("large", prompt(200), PARAMS)
    assert isinstance(failed.error, RequestFailedError)
    assert "Impacting Interactivity" in str(failed.error)
    assert gpu.sizes == [64, 32]
    harness.add("small", prompt(PAGE - 2), PARAMS)
    harness.check("small")


def test_other_errors_are_not_tried_again() -> None:
    assert not gpu_stopped(RuntimeError(FAULT))
    harness = Harness(tiny_model(CASE, quantized=True))
    FakeGpu(harness, FAULT, steps=(2,))
    assert isinstance(harness.run("a", prompt(20), PARAMS).error, RequestFailedError)


def test_an_engine_whose_gpu_takes_no_more_work_ends_and_says_so() -> None:
    model, events = tiny_model(CASE, quantized=True), []

    def make(emit: Any) -> Loop:
        harness = Harness(model)
        harness.loop._emit = emit
        FakeGpu(harness, IGNORED, steps=(3,))
        return harness.loop

    engine = Engine(make)
    engine.submit(Request("a", prompt(20), PARAMS), events.append)
    engine._thread.join(LIMIT_S)
    assert engine.closed
    last: TokenEvent = events[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, DeviceLostError)
    with pytest.raises(DeviceLostError, match="start the program again"):
        engine.submit(Request("b", prompt(20), PARAMS), events.append)
    engine.close()


def test_a_model_that_is_loaded_on_a_lost_gpu_says_so() -> None:
    def make(_: Any) -> Loop:
        raise RuntimeError(IGNORED)

    with pytest.raises(DeviceLostError, match="start the program again"):
        Engine(make)
