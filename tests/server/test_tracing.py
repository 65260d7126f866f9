"""Spans of answers, as a collector gets them."""

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import CHAT, LiveServer, chat
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mlxinfer.server.watch.tracing import Tracing

CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[LiveServer, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    with LiveServer() as server:
        server.service.tracing = Tracing(exporter, at_once=True)
        yield server, exporter


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        (CHAT, chat("Hello", max_tokens=4), "chat"),
        (CHAT, chat("Hello", max_tokens=4, stream=True), "chat"),
        (
            "/v1/completions",
            {"prompt": "One", "max_tokens": 4, "temperature": 0},
            "text_completion",
        ),
    ],
)
def test_an_answer_has_spans_of_queue_prefill_and_decode(
    traced: tuple[LiveServer, InMemorySpanExporter], path: str, body: Any, operation: str
) -> None:
    server, exporter = traced
    exporter.clear()
    answer = server.post(path, body, headers={"traceparent": CLIENT})
    assert answer.status_code == 200
    server.check_idle()
    spans = [span for span in exporter.get_finished_spans() if span.parent is not None]
    queue, prefill, decode, whole = [
        span for span in spans if f"{span.context.trace_id:032x}" == CLIENT.split("-")[1]
    ]
    assert [queue.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
    assert whole.name == f"{operation} demo"
    assert f"{whole.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {whole.context.span_id}
    assert whole.start_time == queue.start_time
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == whole.end_time
    assert queue.start_time <= queue.end_time < prefill.end_time <= decode.end_time
    found = dict(whole.attributes)
    assert found["gen_ai.operation.name"] == operation
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "demo"
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert not any("One" in str(v) or "Hello" in str(v) for v in found.values())
