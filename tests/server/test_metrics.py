"""/metrics: the names that dashboards ask for, and numbers that agree with what happened."""

from collections.abc import Iterator

import pytest
from lazy_server import LazyServer
from live_server import CHAT, LiveServer, chat, long_chat
from prometheus_client.parser import text_string_to_metric_families
from steps import break_next_step

from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.metrics import RequestMetrics
from tests.waiting import wait_until

pytestmark = pytest.mark.demo  # `small` must be another model than `demo`

Numbers = dict[str, float]
DASHBOARDS = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum
vllm:e2e_request_latency_seconds_count vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:num_requests_running
vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:request_queue_time_seconds_sum
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_max_num_generation_tokens_sum vllm:request_success_total
vllm:iteration_tokens_total_count vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
vllm:num_preemptions_total vllm:prompt_tokens_cached_total vllm:admission_rejections_total
vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_per_pos_total
mlxinfer:models_loaded mlxinfer:memory_reserved_bytes mlxinfer:memory_active_bytes
"""


def read(server: LiveServer) -> Numbers:
    """Sample name, with its label where it has one beside the model -> value."""
    answer = server.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        ".".join([sample.name, *(v for k, v in sample.labels.items() if k != "model_name")]): value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if (value := sample.value) is not None
    }


def change(before: Numbers, after: Numbers, *names: str) -> list[float]:
    return [after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in names]


@pytest.fixture
def numbers(server: LiveServer) -> Iterator[Numbers]:
    """What is counted before the test; afterwards nothing runs or waits."""
    yield read(server)
    wait_until(lambda: not server.service.calls)
    metrics = server.service.request_metrics["demo"]
    assert (metrics.num_waiting, metrics.num_running) == (0, 0)
    after = read(server)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_dashboards_find_their_names(numbers: Numbers) -> None:
    names = {name.partition(".")[0] for name in numbers}
    assert set(DASHBOARDS.split()) - names == set()


def test_every_number_belongs_to_a_model(server: LiveServer) -> None:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("vllm:"):
            assert 'model_name="demo"' in line


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_counted_once(server: LiveServer, numbers: Numbers, stream: bool) -> None:
    request = chat("Count to three, please", max_tokens=5, n=2)
    if stream:
        server.events(CHAT, request)
    else:
        server.post(CHAT, request)
    after = read(server)
    tokens, first, between, ended = change(
        numbers,
        after,
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "request_success_total.length",
    )
    assert (tokens, first, between, ended) == (10, 2, 8, 2)
    prompts, sums, calls = change(
        numbers, after, "prompt_tokens_total", "request_prompt_tokens_sum", "request_params_n_count"
    )
    assert prompts == sums / 2 > 10  # two choices of one prompt
    assert calls == 1
    queue, prefill, decode, whole = change(
        numbers,
        after,
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "e2e_request_latency_seconds_sum",
    )
    assert whole == pytest.approx(queue + prefill + decode, abs=1e-6)
    assert min(prefill, decode) > 0


def test_proposals_are_counted_by_position(server: LiveServer) -> None:
    numbers = read(server)
    stats = server.model.session.engine.stats()["speculation"]
    assert numbers["vllm:spec_decode_num_draft_tokens_total"] == stats["drafted"]
    assert numbers["vllm:spec_decode_num_accepted_tokens_total"] == stats["accepted"]
    for place, count in enumerate(stats["accepted_at"]):
        assert numbers[f"vllm:spec_decode_num_accepted_tokens_per_pos_total.{place}"] == count


def test_cached_prompts_are_hits(server: LiveServer, numbers: Numbers) -> None:
    request = chat("A question that is long enough for a page or two. " * 4, max_tokens=1)
    for _ in range(2):
        usage = server.post(CHAT, request).json()["usage"]
    hits, cached, queries = change(
        numbers,
        read(server),
        "prefix_cache_hits_total",
        "prompt_tokens_cached_total",
        "prefix_cache_queries_total",
    )
    assert hits == cached >= usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert queries == 2 * usage["prompt_tokens"]


def test_a_client_that_leaves_and_a_step_that_fails(server: LiveServer, numbers: Numbers) -> None:
    with server.stream(CHAT, long_chat()) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: read(server)["vllm:num_requests_running"] == 1)
        assert read(server)["vllm:kv_cache_usage_perc"] > 0
    wait_until(lambda: not server.service.calls)
    break_next_step(server)
    assert server.post(CHAT, chat()).status_code == 500
    reasons = [f"request_success_total.{r}" for r in ("abort", "error", "stop", "length")]
    after = read(server)
    assert change(numbers, after, *reasons) == [1, 1, 0, 0]
    failures = "mlxinfer:step_failures_total"
    assert after[failures] - numbers[failures] == 1


def test_what_is_refused_is_no_request(server: LiveServer, numbers: Numbers) -> None:
    assert server.post(CHAT, chat(top_p=3)).status_code == 400
    ended = [f"request_success_total.{r}" for r in ("abort", "error", "stop", "length")]
    assert change(numbers, read(server), *ended) == [0, 0, 0, 0]


def test_a_full_queue_is_counted() -> None:
    with LiveServer(engine={"max_batch": 1}, max_waiting=1) as server:
        with server.stream(CHAT, long_chat(n=2)):
            wait_until(lambda: server.service.admission.num_waiting == 1)
            assert server.post(CHAT, chat()).status_code == 503
            now = read(server)
        assert now["vllm:admission_rejections_total"] == 1
        assert now["vllm:num_requests_waiting"] == 1
        wait_until(lambda: not server.service.calls)
        metrics = server.service.request_metrics["demo"]
        assert (metrics.num_waiting, metrics.num_running) == (0, 0)


def test_models_that_are_not_loaded_have_numbers_too() -> None:
    with LazyServer() as server:
        assert read(server)["mlxinfer:models_loaded"] == 0
        server.post(CHAT, chat(model="small"))
        server.post("/admin/models/unload", {"model": "small"})
        text = server.get("/metrics").text
    assert 'vllm:generation_tokens_total{model_name="small"} 8.0' in text
    assert 'vllm:generation_tokens_total{model_name="big"} 0.0' in text
    assert 'mlxinfer:model_unloads_total{model_name="small",reason="asked"} 1.0' in text


def test_this_machine_may_be_let_in_without_a_key() -> None:
    with LiveServer(keys=ApiKeys.from_plain(["right"]), open_metrics=True) as server:
        assert server.get("/metrics").status_code == 200
        assert server.get("/v1/models").status_code == 401
        assert server.get("/metrics/").status_code == 401


def test_values_on_a_bound_belong_below_it() -> None:
    metrics = RequestMetrics()
    for value in (0.5, 1.0, 1.5, 99.0):
        metrics.observe(choices=value)
    assert metrics.counts["choices"] == [2, 1, 0, 0, 0, 1]
    assert metrics.sums["choices"] == 102.0
