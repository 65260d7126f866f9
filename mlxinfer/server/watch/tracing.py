"""OpenTelemetry spans of answers, for the extra `otel`: queue, prefill and decode of each.

Names and attributes are those of the semantic conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), and vLLM's for times. Spans hold counts,
times and settings, and nothing of prompts or answers. OpenTelemetry is imported where it is used.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequestError
from ...session.output_processor import OutputProcessor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {  # by the beginning of the path
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/api/generate": "text_completion",
}
NAME = "mlxinfer"


class Tracing:
    """Writes the spans of answers that have ended.

    Args:
        exporter: takes them, in batches and in a thread of its own.
        at_once: instead pass on each span as it ends.

    Raises:
        InvalidRequestError: the extra is not installed.
    """

    def __init__(self, exporter: "SpanExporter", *, at_once: bool = False) -> None:
        self._provider = _provider(exporter, at_once=at_once)
        self._tracer = self._provider.get_tracer(NAME)

    @classmethod
    def to(cls, url: str) -> "Tracing":
        """Spans go to a collector that speaks OTLP over HTTP, such as http://host:4318/v1/traces.

        Raises:
            InvalidRequestError: the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise _missing() from None
        return cls(OTLPSpanExporter(endpoint=url))

    def record(
        self,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        model: str,
        answer_id: str,
        answer: OutputProcessor,
    ) -> None:
        """The spans of one answer: below the client's, if its request names one.

        Args:
            path: of the request.
            headers: of the request; `traceparent` is read.
            model: by its name.
            answer_id: as the client sees it.
            answer: complete.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        result, request = answer.result, answer.request
        assert result is not None
        timing = result.timing
        since_s = time.time() - time.monotonic()
        arrived_s = since_s + (request.arrived_s or time.monotonic() - timing.total_s)
        marks_s = [arrived_s, timing.queued_s, timing.prefill_s, timing.decode_s]
        queued, started, first, ended = _sums_ns(marks_s)
        operation = OPERATIONS.get(path, "chat")
        whole = self._tracer.start_span(
            f"{operation} {model}",
            context=_context_of(headers),
            kind=SpanKind.SERVER,
            start_time=queued,
            attributes=_attributes(operation, model, answer_id, answer),
        )
        inside = set_span_in_context(whole)
        for name, begin, end in (
            ("queue", queued, started),
            ("prefill", started, first),
            ("decode", first, ended),
        ):
            part = self._tracer.start_span(name, context=inside, start_time=begin)
            part.end(end)
        whole.end(ended)

    def close(self) -> None:
        """Pass on what is left."""
        self._provider.shutdown()


def _provider(exporter: "SpanExporter", *, at_once: bool) -> "TracerProvider":
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError:
        raise _missing() from None
    provider = TracerProvider(resource=Resource.create({"service.name": NAME}))
    processor = SimpleSpanProcessor if at_once else BatchSpanProcessor
    provider.add_span_processor(processor(exporter))
    return provider


def _missing() -> InvalidRequestError:
    return InvalidRequestError(
        'Traces need OpenTelemetry: pip install "mlxinfer[otel]".', param="otlp_traces_endpoint"
    )


def _context_of(headers: Sequence[tuple[bytes, bytes]]) -> Any:
    """The client's span, as W3C's trace context names it."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return TraceContextTextMapPropagator().extract(named)


def _attributes(
    operation: str, model: str, answer_id: str, answer: OutputProcessor
) -> Mapping[str, Any]:
    result, params = answer.result, answer.request.params
    assert result is not None
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.response.finish_reasons": (str(result.finish_reason),),
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.latency.time_in_queue": result.timing.queued_s,
        "gen_ai.latency.time_to_first_token": result.timing.time_to_first_token_s,
        "gen_ai.latency.e2e": result.timing.total_s,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    return found


def _sums_ns(parts_s: Sequence[float]) -> list[int]:
    """Where each part ends, in nanoseconds since 1970; the first part is the beginning."""
    sums, total_s = [], 0.0
    for part_s in parts_s:
        total_s += part_s
        sums.append(int(1e9 * total_s))
    return sums
