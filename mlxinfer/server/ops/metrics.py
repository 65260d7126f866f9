"""GET /metrics: request and engine metrics for Prometheus, under vLLM's names and our own."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...errors import EngineClosedError
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..http.replies import Body, Reply
from ..registry.served import ServedModel
from ..registry.slots import Slot, State
from ..watch.request_metrics import Histogram, RequestMetrics

MODEL = ["model_name"]
COUNTERS: dict[str, tuple[Callable[[RequestMetrics], int], str]] = {  # vLLM's name -> value, help
    "vllm:prompt_tokens": (lambda m: m.prompt_tokens, "Prompt tokens, cached ones included."),
    "vllm:prompt_tokens_cached": (
        lambda m: m.cached_tokens,
        "Prompt tokens found in the prefix cache.",
    ),
    "vllm:prefix_cache_queries": (
        lambda m: m.prompt_tokens,
        "Prompt tokens looked for in the prefix cache.",
    ),
    "vllm:prefix_cache_hits": (
        lambda m: m.cached_tokens,
        "Prompt tokens found in the prefix cache.",
    ),
    "vllm:generation_tokens": (lambda m: m.generation_tokens, "Answer tokens."),
    "vllm:admission_rejections": (lambda m: m.num_rejected, "Calls that found the queue full."),
}
HISTOGRAMS: dict[str, tuple[Callable[[RequestMetrics], Histogram], str]] = {
    "vllm:time_to_first_token_seconds": (
        lambda m: m.first_token_s,
        "From the request to its first token.",
    ),
    "vllm:inter_token_latency_seconds": (
        lambda m: m.inter_token_s,
        "Between two tokens of an answer.",
    ),
    "vllm:request_time_per_output_token_seconds": (
        lambda m: m.per_token_s,
        "Of a request, on average.",
    ),
    "vllm:e2e_request_latency_seconds": (lambda m: m.e2e_s, "From the request to its last token."),
    "vllm:request_queue_time_seconds": (lambda m: m.queue_s, "Before the first step."),
    "vllm:request_prefill_time_seconds": (lambda m: m.prefill_s, "First step to first token."),
    "vllm:request_decode_time_seconds": (lambda m: m.decode_s, "First token to last."),
    "vllm:request_inference_time_seconds": (lambda m: m.inference_s, "First step to last token."),
    "vllm:request_prompt_tokens": (
        lambda m: m.request_prompt_tokens,
        "Prompt tokens of a request.",
    ),
    "vllm:request_generation_tokens": (lambda m: m.request_tokens, "Answer tokens of a request."),
    "vllm:request_max_num_generation_tokens": (
        lambda m: m.longest_tokens,
        "Of the answers of a call.",
    ),
    "vllm:request_params_max_tokens": (lambda m: m.max_tokens, "max_tokens, as asked."),
    "vllm:request_params_n": (lambda m: m.choices, "Answers of a call."),
}
ENGINE_COUNTERS = {  # name -> key of Engine.stats, help
    "vllm:num_preemptions": ("preemptions", "Requests that had to make room for others."),
    "mlxinfer:step_failures": ("step_failures", "Steps that ended with an error."),
    "mlxinfer:prompt_tokens_computed": ("prompt_tokens_computed", "Not found in any cache."),
    "mlxinfer:kv_bytes_copied": ("bytes_copied", "Tails copied because a step was in flight."),
}
ENGINE_GAUGES = {
    "mlxinfer:kv_bytes_held": ("kv_bytes_held", "KV cache of running requests."),
    "mlxinfer:kv_bytes_cached": ("kv_bytes_cached", "KV cache kept for requests to come."),
    "mlxinfer:kv_bytes_allocated": ("kv_bytes_allocated", "KV cache, all arrays."),
}
MEMORY_GAUGES = {  # of the process: the same for every engine
    "mlxinfer:memory_active_bytes": ("active_memory_bytes", "Arrays of MLX now."),
    "mlxinfer:adapter_bytes": ("adapter_bytes", "Matrices of loaded adapters."),
    "mlxinfer:memory_peak_bytes": ("peak_memory_bytes", "Arrays of MLX at most."),
}
SPECULATION_COUNTERS = {  # name -> key of stats["speculation"], help
    "vllm:spec_decode_num_drafts": ("drafts", "Rows of steps that verified proposals."),
    "vllm:spec_decode_num_draft_tokens": ("drafted", "Tokens proposed and verified."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Of these, tokens of answers."),
    "mlxinfer:spec_decode_num_switched_off": ("switched_off", "Requests without a failed source."),
}
DISK_COUNTERS = ("hits", "misses", "written", "dropped", "evicted", "corrupt", "errors")


@dataclass(slots=True, eq=False)
class ServerMetrics(Collector):
    """All metrics of a server at one moment, as Prometheus's families.

    Attributes:
        slots: the models of the registry.
        request_metrics: by model name.
        engine_stats: Engine.stats by model name, of loaded models that answered in time.
        limit_bytes: memory budget of all models.
    """

    slots: Sequence[Slot]
    request_metrics: Mapping[str, RequestMetrics]
    engine_stats: Mapping[str, Mapping[str, Any]]
    limit_bytes: int

    def text(self) -> bytes:
        """In Prometheus's text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._requests()
        yield from self._engines()
        yield from self._models()
        yield from self._disk()
        yield from self._speculation()

    def _requests(self) -> Iterator[Metric]:
        for name, (value, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=MODEL)
            for model, metrics in self.request_metrics.items():
                counter.add_metric([model], value(metrics))
            yield counter
        for name, (values, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=MODEL)
            for model, metrics in self.request_metrics.items():
                _add(histogram, model, values(metrics))
            yield histogram
        labels = [*MODEL, "finished_reason"]
        ended = CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=labels)
        for model, metrics in self.request_metrics.items():
            for reason, count in metrics.finished.items():
                ended.add_metric([model, reason], count)
        yield ended

    def _engines(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "In the batch.", labels=MODEL)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "In the queue.", labels=MODEL)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Of the KV cache in use; 1 is all.", labels=MODEL
        )
        for model, metrics in self.request_metrics.items():
            stats = self.engine_stats.get(model, {})
            running.add_metric([model], stats.get("running", metrics.num_running))
            waiting.add_metric([model], stats.get("waiting", metrics.num_waiting))
            usage.add_metric([model], _usage(stats))
        yield from (running, waiting, usage)
        for name, (key, text) in ENGINE_COUNTERS.items():
            yield self._of_engines(CounterMetricFamily(name, text, labels=MODEL), key)
        for name, (key, text) in ENGINE_GAUGES.items():
            yield self._of_engines(GaugeMetricFamily(name, text, labels=MODEL), key)
        steps = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of a step; no buckets.", labels=MODEL
        )
        for model, stats in self.engine_stats.items():
            steps.add_metric([model], [("+Inf", stats["steps"])], stats["tokens_computed"])
        yield steps
        for name, (key, text) in MEMORY_GAUGES.items():
            values = [stats[key] for stats in self.engine_stats.values()]
            yield GaugeMetricFamily(name, text, value=max(values, default=0))

    def _models(self) -> Iterator[Metric]:
        loaded = sum(slot.state is State.LOADED for slot in self.slots)
        held = sum(slot.held_bytes for slot in self.slots)
        yield GaugeMetricFamily("mlxinfer:models_loaded", "Models in memory.", value=loaded)
        yield GaugeMetricFamily("mlxinfer:memory_reserved_bytes", "By loaded models.", value=held)
        yield GaugeMetricFamily(
            "mlxinfer:memory_limit_bytes", "Of all models.", value=self.limit_bytes
        )
        state = GaugeMetricFamily("mlxinfer:model_loaded", "1: it is in memory.", labels=MODEL)
        weights = GaugeMetricFamily("mlxinfer:weights_bytes", "When loaded.", labels=MODEL)
        budget = GaugeMetricFamily("mlxinfer:kv_budget_bytes", "When loaded.", labels=MODEL)
        loads = CounterMetricFamily("mlxinfer:model_loads", "That worked.", labels=MODEL)
        failures = CounterMetricFamily("mlxinfer:model_load_failures", "Loads.", labels=MODEL)
        unloads = CounterMetricFamily(
            "mlxinfer:model_unloads",
            "By reason: idle, memory, asked, fault.",
            labels=[*MODEL, "reason"],
        )
        for slot in self.slots:
            name = slot.entry.name
            state.add_metric([name], slot.state is State.LOADED)
            weights.add_metric([name], slot.weights_bytes)
            budget.add_metric([name], slot.kv_bytes)
            loads.add_metric([name], slot.num_loads)
            failures.add_metric([name], slot.num_failures)
            for reason, count in slot.unloads.items():
                unloads.add_metric([name, reason], count)
        yield from (state, weights, budget, loads, failures, unloads)

    def _disk(self) -> Iterator[Metric]:
        with_disk = {m: v["disk"] for m, v in self.engine_stats.items() if "disk" in v}
        for key in DISK_COUNTERS:
            counter = CounterMetricFamily(f"mlxinfer:disk_cache_{key}", "Pages.", labels=MODEL)
            for model, disk in with_disk.items():
                counter.add_metric([model], disk[key])
            yield counter
        size = GaugeMetricFamily("mlxinfer:disk_cache_bytes", "Of all models.", labels=MODEL)
        for model, disk in with_disk.items():
            size.add_metric([model], disk["num_bytes"])
        yield size

    def _speculation(self) -> Iterator[Metric]:
        proposing = {
            m: v["speculation"] for m, v in self.engine_stats.items() if "speculation" in v
        }
        for name, (key, text) in SPECULATION_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=MODEL)
            for model, stats in proposing.items():
                counter.add_metric([model], stats[key])
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their place among the proposals of a step.",
            labels=[*MODEL, "position"],
        )
        for model, stats in proposing.items():
            for place, count in enumerate(stats["accepted_at"]):
                by_place.add_metric([model, str(place)], count)
        yield by_place

    def _of_engines(
        self, family: CounterMetricFamily | GaugeMetricFamily, key: str
    ) -> CounterMetricFamily | GaugeMetricFamily:
        for model, stats in self.engine_stats.items():
            family.add_metric([model], stats[key])
        return family


def _add(family: HistogramMetricFamily, model: str, histogram: Histogram) -> None:
    family.add_metric([model], list(histogram.cumulative()), histogram.sum)


def _usage(stats: Mapping[str, Any]) -> float:
    """Share of the KV cache that running requests hold, by bytes."""
    groups = stats.get("groups", ())
    total = sum(group["pages"] * group["page_bytes"] for group in groups)
    held = sum(group["pages_held"] * group["page_bytes"] for group in groups)
    return held / total if total else 0.0


STATS_S = 1.0  # that an engine has to answer; without its stats the rest is still served


async def metrics(call: Call, _: None) -> Reply:
    """All metrics at this moment."""
    return Body((await snapshot(call.service)).text(), media_type=CONTENT_TYPE_LATEST.encode())


async def snapshot(service: Service) -> ServerMetrics:
    """The metrics of a service; a stuck engine is left out."""
    running = service.models.running()
    found = await asyncio.gather(*(_stats_of(service, model) for model in running))
    stats = {m.name: v for m, v in zip(running, found, strict=True) if v is not None}
    models = service.models
    return ServerMetrics(models.slots(), service.request_metrics, stats, models.limit_bytes)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/metrics",
        handler=metrics,
        summary="Numbers for Prometheus, under vLLM's names and mlxinfer's own.",
    ),
)


async def _stats_of(service: Service, model: ServedModel) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(STATS_S):
            return await service.engine_stats.of(model)
    except (TimeoutError, EngineClosedError):
        return None
