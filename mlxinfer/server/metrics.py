"""Numbers of requests and engines, as Prometheus reads them.

Names of metrics are vLLM's, so that its dashboards and alerts fit. Other names begin with mlxinfer.
Counting happens on the event loop, so nothing is locked. A token costs a bisection and a few
additions.
"""

import asyncio
import logging
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ..core import Request, TokenEvent
from ..errors import EngineClosedError
from ..outputs import Result
from ..session.answers import Answer, Answers
from .models import ModelRegistry
from .reuse import ReuseRecord, ReuseRecords
from .slots import ModelSlot, ServedModel
from .workers import apart

log = logging.getLogger("mlxinfer.server")

# vLLM's buckets (vllm/v1/metrics/loggers.py)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
REASONS = ("stop", "length", "abort", "error")

MODEL = ["model_name"]
HISTOGRAMS = {  # field of RequestMetrics -> name, bounds, help
    "first_token_s": ("vllm:time_to_first_token_seconds", FIRST_TOKEN_S,
                      "From the request to its first token."),
    "inter_token_s": ("vllm:inter_token_latency_seconds", TOKEN_S,
                      "Between two tokens of an answer."),
    "per_token_s": ("vllm:request_time_per_output_token_seconds", TOKEN_S,
                    "Mean time of a token of a request."),
    "e2e_s": ("vllm:e2e_request_latency_seconds", REQUEST_S, "From the request to its end."),
    "queue_s": ("vllm:request_queue_time_seconds", REQUEST_S,
                "From the request to its first step."),
    "prefill_s": ("vllm:request_prefill_time_seconds", REQUEST_S,
                  "From the first step to the first token."),
    "decode_s": ("vllm:request_decode_time_seconds", REQUEST_S,
                 "From the first token to the last."),
    "inference_s": ("vllm:request_inference_time_seconds", REQUEST_S,
                    "From the first step to the last token."),
    "request_prompt_tokens": ("vllm:request_prompt_tokens", TOKENS, "Prompt tokens of a request."),
    "request_tokens": ("vllm:request_generation_tokens", TOKENS, "Answer tokens of a request."),
    "longest_tokens": ("vllm:request_max_num_generation_tokens", TOKENS,
                       "Tokens of the longest answer of a call."),
    "max_tokens": ("vllm:request_params_max_tokens", TOKENS, "max_tokens of a request."),
    "choices": ("vllm:request_params_n", CHOICES, "Answers of a call."),
}  # fmt: skip
DISK_COUNTS = {
    "hits": "found",
    "misses": "not found",
    "written": "written",
    "dropped": "not written because the queue was full or they were too large",
    "evicted": "deleted for room",
    "corrupt": "damaged",
    "errors": "not read or written because of the file system",
}
C, G = CounterMetricFamily, GaugeMetricFamily
# kind, source, and name -> key or attribute of the source, help; a number of each model
FAMILIES = (
    (C, "requests", {
        "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones included."),
        "vllm:prompt_tokens_cached": ("cached_tokens", "Prompt tokens found in the prefix cache."),
        "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked for in the cache."),
        "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
        "vllm:generation_tokens": ("generation_tokens", "Answer tokens."),
        "vllm:admission_rejections": ("num_rejected", "Calls that found the queue full."),
    }),
    (C, "engines", {
        "vllm:num_preemptions": ("preemptions", "Requests that had to make room for others."),
        "mlxinfer:step_failures": ("step_failures", "Steps that ended with an error."),
        "mlxinfer:prompt_tokens_computed": ("prompt_tokens_computed", "Prompt tokens in no cache."),
        "mlxinfer:kv_bytes_copied": ("bytes_copied", "Copied because a step was in flight."),
    }),
    (G, "engines", {
        "mlxinfer:kv_bytes_held": ("kv_bytes_held", "KV cache of running requests."),
        "mlxinfer:kv_bytes_cached": ("kv_bytes_cached", "KV cache kept for requests to come."),
        "mlxinfer:kv_bytes_allocated": ("kv_bytes_allocated", "All arrays of the KV cache."),
    }),
    (C, "speculation", {
        "vllm:spec_decode_num_drafts": ("drafts", "Requests with proposals, over all steps."),
        "vllm:spec_decode_num_draft_tokens": ("drafted", "Tokens proposed and verified."),
        "vllm:spec_decode_num_accepted_tokens": ("accepted", "Proposed tokens that were accepted."),
        "mlxinfer:spec_decode_num_switched_off": ("switched_off", "Requests whose source failed."),
    }),
    (C, "disk", {
        f"mlxinfer:disk_cache_{key}": (key, f"Pages of the disk cache: {text}.")
        for key, text in DISK_COUNTS.items()
    }),
    (G, "disk", {"mlxinfer:disk_cache_bytes": ("num_bytes", "Size of the shared disk cache.")}),
    (C, "peers", {
        "mlxinfer:peer_pages": ("pages", "Pages of the KV cache that came from other servers."),
        "mlxinfer:peer_bytes": ("bytes", "Bytes of the pages that came from other servers."),
        "mlxinfer:peer_failures": ("failures", "Times that a peer failed and was left out."),
    }),
    (C, "pictures", {
        "mlxinfer:pictures_seen": ("seen", "Pictures that the vision tower has seen."),
        "mlxinfer:pictures_failed": ("failed", "Pictures that the vision tower failed on."),
        "mlxinfer:tower_seconds": ("tower_seconds", "Time that the vision tower took."),
    }),
    (G, "pictures", {"mlxinfer:picture_bytes": ("cached_bytes", "Features of recent pictures.")}),
    (G, "slots", {
        "mlxinfer:model_loaded": ("loaded", "1 if the model is in memory, else 0."),
        "mlxinfer:weights_bytes": ("weights_bytes", "Weights of the model, when loaded."),
        "mlxinfer:kv_budget_bytes": ("kv_bytes", "Limit of the KV cache, when loaded."),
    }),
    (C, "slots", {
        "mlxinfer:model_loads": ("num_loads", "Loads that worked."),
        "mlxinfer:model_load_failures": ("num_failures", "Loads that failed."),
    }),
)  # fmt: skip
KEY_NUMBERS = {  # name -> kind, field of KeyMetrics, help
    "mlxinfer:key_requests_waiting": (
        G, "num_waiting", "Requests of a key that wait for their first token."),
    "mlxinfer:key_requests_running": (
        G, "num_running", "Requests of a key that have their first token."),
    "mlxinfer:key_rejections": (
        C, "num_rejected", "Calls of a key that were refused because the queue was full."),
}  # fmt: skip
MEMORY_GAUGES = {  # of the process: the same for every engine
    "mlxinfer:memory_active_bytes": ("active_memory_bytes", "Arrays of MLX now."),
    "mlxinfer:adapter_bytes": ("adapter_bytes", "Matrices of loaded adapters."),
    "mlxinfer:memory_peak_bytes": ("peak_memory_bytes", "Most that arrays of MLX have taken."),
}
STATS_S = 1.0  # that an engine has to answer; without its stats the rest is still served


@dataclass(slots=True)
class KeyMetrics:
    """Numbers of the requests of one key since the server started.

    A request is one answer. It waits until its first token.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_rejected: int = 0  # calls
    num_first: int = 0  # requests that have got a token
    waited_s: float = 0.0  # by these, together

    def shown(self) -> dict[str, float | None]:
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "rejected": self.num_rejected,
            "mean_wait_s": self.waited_s / self.num_first if self.num_first else None,
        }


@dataclass(slots=True)
class RequestMetrics:
    """Counters and histograms of the requests of one model since the server started.

    A request is one answer: a call with n=3 has three.

    Attributes:
        counts: of each histogram, the values up to each bound and above the one before it.
    """

    num_waiting: int = 0  # submitted to the engine, without a token
    num_running: int = 0  # with a token
    num_rejected: int = 0  # calls that found the queue full
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    counts: dict[str, list[int]] = field(
        default_factory=lambda: {k: [0] * (len(b) + 1) for k, (_, b, _) in HISTOGRAMS.items()}
    )
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(HISTOGRAMS, 0.0))

    @contextmanager
    def pooling(self, num_tokens: int) -> Iterator[None]:
        """Count a request for vectors or scores of `num_tokens`, while the block runs."""
        began_s, reason = time.monotonic(), "error"
        self.num_running += 1
        try:
            yield
            reason = "stop"
            self.prompt_tokens += num_tokens
            self.observe(request_prompt_tokens=num_tokens, e2e_s=time.monotonic() - began_s)
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            self.num_running -= 1
            self.finished[reason] += 1

    def observe(self, **values: float) -> None:
        for name, value in values.items():
            self.counts[name][bisect_left(HISTOGRAMS[name][1], value)] += 1
            self.sums[name] += value

    def finish(self, reason: str, result: Result | None) -> None:
        self.finished[reason] += 1
        if result is None:
            return
        timing, num_tokens = result.timing, len(result.token_ids)
        self.observe(
            e2e_s=timing.total_s,
            queue_s=timing.queued_s,
            prefill_s=timing.prefill_s,
            decode_s=timing.decode_s,
            inference_s=timing.prefill_s + timing.decode_s,
            request_prompt_tokens=result.prompt_tokens,
            request_tokens=num_tokens,
        )
        if num_tokens > 1:
            self.observe(per_token_s=timing.decode_s / (num_tokens - 1))


class AnswerMetrics:
    """Counts what becomes of answers; it watches them (`session.answers.AnswerWatcher`).

    Args:
        note_reuse: keeps a record of what the first prompt reused, if its engine says that.
        leave_queue: is called with the index of an answer that waits for no first token any more.

    Attributes:
        reuse: the record of the first prompt, once that is computed.
    """

    def __init__(
        self,
        answers: Answers,
        metrics: tuple[RequestMetrics, KeyMetrics],
        note_reuse: Callable[[Request], ReuseRecord | None],
        records: ReuseRecords,
        leave_queue: Callable[[int], None],
    ) -> None:
        self.reuse: ReuseRecord | None = None
        self._answers = answers
        self._metrics, self._of_key = metrics
        self._note, self._records, self._leave_queue = note_reuse, records, leave_queue
        self._open = set(range(len(answers.answers)))  # those that have not ended
        self._token_s: dict[int, float] = {}  # answers -> when the last token came
        self._counted: set[int] = set()  # identities of prompts: choices share their prompt's list
        self._metrics.num_waiting += len(self._open)
        self._of_key.num_waiting += len(self._open)

    def record(self, index: int, event: TokenEvent) -> None:
        if event.prompt_tokens:
            return
        if event.token_id is None:
            self._leave_queue(index)
            return
        metrics, now_s, before_s = self._metrics, time.monotonic(), self._token_s.get(index)
        self._token_s[index] = now_s
        metrics.generation_tokens += 1
        if before_s is not None:
            metrics.observe(inter_token_s=now_s - before_s)
            return
        self._leave_queue(index)
        request = self._answer(index).request
        metrics.num_waiting -= 1
        metrics.num_running += 1
        self._of_key.num_waiting -= 1
        self._of_key.num_running += 1
        self._of_key.num_first += 1
        self._of_key.waited_s += now_s - request.arrived_s
        if id(request.prompt_ids) not in self._counted:
            self._counted.add(id(request.prompt_ids))
            metrics.prompt_tokens += len(request.prompt_ids)
            metrics.cached_tokens += event.cached_tokens
        metrics.observe(first_token_s=now_s - request.arrived_s)
        if index == 0 and not request.from_peer:
            self._note_reuse(request)

    def _note_reuse(self, request: Request) -> None:
        """Remember where the reuse of a prompt ended; the log gets none of its text."""
        self.reuse = self._note(request)
        if self.reuse is not None:
            names = ("model", "prompt_tokens", "cached_tokens", "tiers", "cause", "position")
            fields = {name: self.reuse.shown[name] for name in names}
            log.debug("prompt reuse", extra={"request_id": self.reuse.request_id, **fields})

    def end(self, index: int, reason: str, result: Result | None) -> None:
        if index not in self._open:
            return
        self._open.discard(index)
        if index in self._token_s:
            self._metrics.num_running -= 1
            self._of_key.num_running -= 1
        else:
            self._metrics.num_waiting -= 1
            self._of_key.num_waiting -= 1
        self._metrics.finish(reason, result)
        if index == 0 and self.reuse is not None and result is not None:
            owner = self._answer(index).request.owner
            self._records.answered(owner, self.reuse, result.token_ids)
        max_tokens = self._answer(index).request.params.max_tokens
        if max_tokens is not None:
            self._metrics.observe(max_tokens=max_tokens)
        if not self._open:
            longest = max(len(answer.token_ids) for answer in self._answers.answers)
            self._metrics.observe(choices=len(self._answers.answers), longest_tokens=longest)

    def close(self) -> None:
        """Count the answers that have not ended as aborted, and leave the queue."""
        for index in range(len(self._answers.answers)):
            self.end(index, "abort", None)
            self._leave_queue(index)

    def _answer(self, index: int) -> Answer:
        return self._answers.answers[index]


class EngineStats:
    """Engine.stats of running models. A stuck engine blocks one thread, even if read often."""

    def __init__(self) -> None:
        self._pending: weakref.WeakKeyDictionary[ServedModel, asyncio.Future[dict[str, Any]]]
        self._pending = weakref.WeakKeyDictionary()

    async def of(self, model: ServedModel) -> dict[str, Any]:
        """The stats of one model; waits as long as its engine takes to answer."""
        pending = self._pending.get(model)
        if pending is None or pending.done():
            pending = apart(model.session.stats, "mlxinfer-stats")
            pending.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._pending[model] = pending
        return await asyncio.shield(pending)

    async def soon(self, model: ServedModel) -> dict[str, Any] | None:
        """The stats of one model; None: its engine is closed, or does not answer within STATS_S."""
        try:
            async with asyncio.timeout(STATS_S):
                return await self.of(model)
        except (TimeoutError, EngineClosedError):
            return None

    async def all(self, models: ModelRegistry) -> dict[str, dict[str, Any]]:
        running = models.running()
        stats = await asyncio.gather(*map(self.soon, running))
        return {m.name: v for m, v in zip(running, stats, strict=True) if v is not None}


@dataclass(slots=True, eq=False)
class ServerMetrics(Collector):
    """All metrics of a server at one moment, as Prometheus's families."""

    slots: Sequence[ModelSlot]  # the models of the server
    request_metrics: Mapping[str, RequestMetrics]  # by model name
    key_metrics: Mapping[str, KeyMetrics]  # by name of the key
    # Engine.stats by model name, of loaded models that answered in time
    engine_stats: Mapping[str, Mapping[str, Any]]
    limit_bytes: int  # memory budget of all models

    def text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        slots = {slot.entry.name: slot for slot in self.slots}
        sources: dict[str, Mapping[str, Any]] = {
            "requests": self.request_metrics,
            "engines": self.engine_stats,
            "slots": slots,
            **{part: self._parts(part) for part in ("speculation", "disk", "peers", "pictures")},
        }
        for kind, source, table in FAMILIES:
            getter = attrgetter if source in ("requests", "slots") else itemgetter
            for name, (key, text) in table.items():
                rows = [
                    ((model,), getter(key)(values)) for model, values in sources[source].items()
                ]
                yield _family(kind, name, text, rows)
        yield from self._requests()
        yield from self._keys()
        yield from self._engines()
        yield from self._process()
        unloads = {(s.entry.name, reason): n for s in self.slots for reason, n in s.unloads.items()}
        text = "Times that a model was unloaded; reasons: idle, memory, asked, fault."
        yield _family(C, "mlxinfer:model_unloads", text, unloads.items(), "reason")
        accepted = {
            (model, str(place)): count
            for model, stats in sources["speculation"].items()
            for place, count in enumerate(stats["accepted_at"])
        }
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        text = "Accepted tokens, by their position among the proposals of a step."
        yield _family(C, name, text, accepted.items(), "position")

    def _requests(self) -> Iterator[Metric]:
        by_model = self.request_metrics
        for key, (name, bounds, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=MODEL)
            for model, metrics in by_model.items():
                counts, names = accumulate(metrics.counts[key]), [*map(str, bounds), "+Inf"]
                pairs = list(zip(names, counts, strict=True))
                histogram.add_metric([model], pairs, metrics.sums[key])
            yield histogram
        ended = {
            (model, reason): count
            for model, metrics in by_model.items()
            for reason, count in metrics.finished.items()
        }
        text = "Requests that ended."
        yield _family(C, "vllm:request_success", text, ended.items(), "finished_reason")

    def _keys(self) -> Iterator[Metric]:
        for name, (kind, source, text) in KEY_NUMBERS.items():
            family = kind(name, text, labels=["key"])
            for key, metrics in self.key_metrics.items():
                family.add_metric([key], getattr(metrics, source))
            yield family
        text = "From a request of a key to its first token."
        waits = SummaryMetricFamily(
            "mlxinfer:key_time_to_first_token_seconds", text, labels=["key"]
        )
        for key, metrics in self.key_metrics.items():
            waits.add_metric([key], metrics.num_first, metrics.waited_s)
        yield waits

    def _engines(self) -> Iterator[Metric]:
        stats = {model: self.engine_stats.get(model, {}) for model in self.request_metrics}
        for name, place in (("running", "batch"), ("waiting", "queue")):
            rows = [
                ((model,), stats[model].get(name, getattr(metrics, f"num_{name}")))
                for model, metrics in self.request_metrics.items()
            ]
            yield _family(G, f"vllm:num_requests_{name}", f"Requests in the {place}.", rows)
        usage = [((model,), _usage(values)) for model, values in stats.items()]
        text = "Share of the KV cache that is in use, from 0 to 1."
        yield _family(G, "vllm:kv_cache_usage_perc", text, usage)
        text = "Tokens that a step computed; it has no buckets."
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=MODEL)
        for model, values in self.engine_stats.items():
            steps.add_metric([model], [("+Inf", values["steps"])], values["tokens_computed"])
        yield steps

    def _process(self) -> Iterator[Metric]:
        for name, (key, text) in MEMORY_GAUGES.items():
            values = [stats[key] for stats in self.engine_stats.values()]
            yield G(name, text, value=max(values, default=0))
        loaded, held = (sum(getattr(s, n) for s in self.slots) for n in ("loaded", "held_bytes"))
        yield G("mlxinfer:models_loaded", "Models in memory.", value=loaded)
        yield G("mlxinfer:memory_reserved_bytes", "Memory that loaded models reserve.", value=held)
        yield G(
            "mlxinfer:memory_limit_bytes", "Memory limit of all models.", value=self.limit_bytes
        )

    def _parts(self, name: str) -> dict[str, Mapping[str, Any]]:
        return {m: stats[name] for m, stats in self.engine_stats.items() if name in stats}


def _family(
    kind: Any, name: str, text: str, rows: Iterable[tuple[tuple[str, ...], Any]], *labels: str
) -> Metric:
    family: Metric = kind(name, text, labels=[*MODEL, *labels])
    for place, value in rows:
        family.add_metric(place, value)  # type: ignore[attr-defined]  # of each kind
    return family


def _usage(stats: Mapping[str, Any]) -> float:
    groups = stats.get("groups", ())
    total = sum(group["pages"] * group["page_bytes"] for group in groups)
    held = sum(group["pages_held"] * group["page_bytes"] for group in groups)
    return held / total if total else 0.0
