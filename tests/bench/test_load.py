"""`mlxinfer bench serve`: what is sent, what is counted, and what goes wrong."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from bench.bench_parts import check
from click.testing import CliRunner

from mlxinfer.bench.load import ChatClient, ServerLoad, TimedAnswer, arrivals, bodies, run, summary
from mlxinfer.cli._commands import cli
from mlxinfer.errors import InvalidRequestError, NoServerError
from tests.waiting import LIMIT_S


class Scripted(ThreadingHTTPServer):
    """A server of OpenAI's chat API: two pieces of text, or what a prompt's number stands for."""

    daemon_threads = True
    most_at_once = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.at_once, self.lock = 0, threading.Lock()
        self.fails: dict[int, str] = {}  # request number -> how
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "only"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append({**body, "key": self.headers.get("Authorization")})
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        how = self.server.fails.get(number)
        if how == "hangs":
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            self.server.hangs.set()
            assert self.server.goes_on.wait(LIMIT_S)
        elif how == "busy":
            self._answer(503, {"error": {"message": "too many requests wait"}})
        else:
            self._stream(how)
        with self.server.lock:
            self.server.at_once -= 1

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, how: str | None) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [{"choices": [{"delta": {"content": text}}]} for text in ("two ", "words")]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
        if how == "broken":
            events[1] = {"error": {"message": "the engine failed"}}
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        lines += "" if how == "cut" else "data: [DONE]\n\n"
        data = lines.encode()
        for piece in (data[:30], data[30:]):  # chunks end where they like
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as scripted:
        thread = threading.Thread(target=scripted.serve_forever)
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()


def test_answers_are_counted_as_the_server_counts(server: Scripted) -> None:
    load = ServerLoad(url=server.url, requests=9, concurrency=3, answer_tokens=(2, 5), key="secret")
    report = run(load)
    check(report)
    data = report.data
    assert (data["completed"], data["failed"]) == (9, 0)
    assert (data["prompt_tokens"], data["answer_tokens"]) == (63, 18)
    assert data["answer_tokens_per_s"] == pytest.approx(18 / data["seconds"])
    assert 1 <= server.most_at_once <= 3
    assert {body["model"] for body in server.bodies} == {"only"}, "the first that is listed"
    assert {body["max_tokens"] for body in server.bodies} <= {2, 3, 4, 5}
    assert {body["key"] for body in server.bodies} == {"Bearer secret"}
    assert "secret" not in json.dumps(report.as_dict())


def test_failures_are_counted_by_what_was_said_and_leave_no_times(server: Scripted) -> None:
    server.fails = {0: "busy", 1: "broken", 2: "cut", 3: "busy"}
    data = run(ServerLoad(url=server.url, requests=6, concurrency=1)).data
    assert (data["completed"], data["failed"]) == (2, 4)
    assert data["errors"] == {
        "status 503: too many requests wait": 2,
        "the engine failed": 1,
        "the stream ended before it was done": 1,
    }
    assert data["answer_tokens"] == 4


def test_the_command_fails_where_a_request_failed(server: Scripted) -> None:
    arguments = ["bench", "serve", "--url", server.url, "--requests", "2"]
    done = CliRunner().invoke(cli, [*arguments, "--prompt-tokens", "5-9"])
    assert done.exit_code == 0, done.output
    assert "2 / 0" in done.output
    server.fails = {2: "busy"}
    assert CliRunner().invoke(cli, arguments).exit_code == 1


def test_a_request_can_be_broken_off(server: Scripted) -> None:
    server.fails = {0: "hangs"}
    client, collected = ChatClient(server.url, timeout_s=60), []
    thread = threading.Thread(target=lambda: collected.append(client.chat({"model": "only"})))
    thread.start()
    assert server.hangs.wait(LIMIT_S)
    client.hang_up()
    thread.join(LIMIT_S)
    server.goes_on.set()
    assert not thread.is_alive()
    assert collected[0].error is not None


def test_where_nothing_listens_one_line_says_so(server: Scripted) -> None:
    with pytest.raises(InvalidRequestError, match="no address"):
        run(ServerLoad(url="localhost"))
    with pytest.raises(NoServerError, match="answers at http"):
        run(ServerLoad(url="http://127.0.0.1:9"))


def test_the_same_seed_asks_the_same_and_no_two_prompts_begin_alike() -> None:
    load = ServerLoad(url="", requests=50, prompt_tokens=(20, 60), seed=3)
    asked = [body["messages"][0]["content"] for body in bodies(load)]
    assert asked == [body["messages"][0]["content"] for body in bodies(load)]
    assert len({text.split()[0] for text in asked}) == 50
    lengths = [len(text.split()) for text in asked]
    assert 17 <= min(lengths) < max(lengths) <= 57
    other = [body["messages"][0]["content"] for body in bodies(replace(load, seed=4))]
    assert asked != other


def test_arrivals_come_at_the_rate() -> None:
    due = list(arrivals(ServerLoad(url="", requests=4000, rate=20.0)))
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert set(arrivals(ServerLoad(url="", requests=5))) == {0.0}


def test_percentiles_are_of_finished_answers() -> None:
    answers = [
        TimedAnswer(sent_s=0.0, pieces_s=[n / 100, n / 100 + 1], num_tokens=3, ended_s=n / 100 + 1)
        for n in range(1, 101)
    ]
    data = summary([*answers, TimedAnswer(error="refused", ended_s=99.0)], seconds=10.0)
    assert data["first_token_s"]["p50"] == pytest.approx(0.505)
    assert data["first_token_s"]["max"] == 1.0
    assert data["seconds_per_token"]["mean"] == pytest.approx(0.5)
    assert data["gap_s"]["p99"] == pytest.approx(1.0)
    assert data["errors"] == {"refused": 1}


@pytest.mark.parametrize(
    ("url", "path"),
    [("http://h:1", "/v1"), ("http://h:1/v1/", "/v1"), ("https://h/openai/v1", "/openai/v1")],
)
def test_an_address_is_taken_with_and_without_v1(url: str, path: str) -> None:
    assert ChatClient(url)._path == f"{path}/chat/completions"
