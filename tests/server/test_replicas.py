"""Two servers behind smg: streams, keys, affinity to the prefix cache, a server that dies."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from live_server import CHAT

from benchmarks.processes import free_port

KEY = "replica-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MODEL = "demo-draft"  # the smaller one
CONVERSATIONS, TURNS = 12, 2
OPENING = 4  # tokens
SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@contextmanager
def process(
    command: list[str], url: str, path: str, data: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program while the block runs, from when it answers at a path with 200."""
    env = {**os.environ, "XDG_DATA_HOME": str(data)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env) as ran:
        try:
            until_s = time.monotonic() + 60
            while True:
                assert ran.poll() is None, f"{command} ended"
                assert time.monotonic() < until_s, f"{url}{path} does not answer"
                with suppress(httpx.TransportError):
                    if httpx.get(url + path, headers=HEADERS, timeout=5).status_code == 200:
                        break
                time.sleep(0.05)
            yield ran
        finally:
            ran.kill()


@contextmanager
def router(workers: list[str], policy: str, data: Path) -> Iterator[str]:
    """The address of smg once it has all workers."""
    assert SMG is not None
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *workers, "--api-key", KEY]
    command += ["--sticky-sessions", "--health-check-interval-secs", "1"]
    with process(command, url, "/health", data):
        until_s = time.monotonic() + 60
        while httpx.get(f"{url}/workers", headers=HEADERS, timeout=60).json()["total"] < len(
            workers
        ):
            assert time.monotonic() < until_s, "smg does not find the workers"
            time.sleep(0.1)
        yield url


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """An answer, the tokens of its prompt, and those of them that were cached."""
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def hits(url: str, topic: str) -> tuple[float, int]:
    """Conversations, the turns of all in another order each time, and what a cache had of them.

    Returns:
        The share of later turns that found the whole turn before, and the cached prompt tokens.
    """
    talks = [
        [{"role": "user", "content": f"{topic} {i} is about number {i * 7919} and its use."}]
        for i in range(CONVERSATIONS)
    ]
    asked, stayed, cached = [0] * CONVERSATIONS, 0, 0
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:
        for turn in range(TURNS):
            for i in random.Random(turn).sample(range(CONVERSATIONS), CONVERSATIONS):
                talk = talks[i]
                text, num_tokens, reused = ask(client, talk)
                # less the opening of the answer, which the template may write in another way
                stayed += turn > 0 and reused >= asked[i] - OPENING
                asked[i], cached = num_tokens, cached + reused
                talk += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"Go on, part {turn}."},
                ]
    return stayed / CONVERSATIONS / (TURNS - 1), cached


@pytest.mark.alike
@pytest.mark.ci  # three processes
@pytest.mark.skipif(SMG is None, reason="needs smg: pip install smg")
def test_two_servers_behind_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams pass, keys hold, conversations stay where their prefix is, a death is survived."""
    monkeypatch.setenv("MLXINFER_SERVE_STORE", "true")  # which servers without history do not
    with ExitStack() as stack:
        urls, servers = [], []
        for _ in range(2):
            port = free_port()
            command = [sys.executable, "-m", "mlxinfer.cli", "serve", "--port", str(port)]
            command += ["-m", MODEL, "--no-history", "--api-key", KEY]
            urls.append(f"http://127.0.0.1:{port}")
            servers.append(
                stack.enter_context(process(command, urls[-1], "/ready", tmp_path / str(port)))
            )
        with router(urls, "round_robin", tmp_path) as url:
            in_turn = hits(url, "Conversation")
        with router(urls, "cache_aware", tmp_path) as url:
            kept = hits(url, "Talk")  # of which nothing is cached yet
            print(f"turns that find the one before: {kept[0]:.2f}, in turn {in_turn[0]:.2f}")
            print(f"prompt tokens from the cache: {kept[1]}, in turn {in_turn[1]}")
            assert kept[0] >= 0.8 > in_turn[0]
            assert kept[1] > in_turn[1]
            with httpx.Client(base_url=url, headers=HEADERS, timeout=60) as client:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
                assert (
                    client.post(CHAT, json=body, headers={"Authorization": "x"}).status_code == 401
                )
                with client.stream("POST", CHAT, json={**body, "stream": True}) as events:
                    lines = [line for line in events.iter_lines() if line]
                assert lines[-1] == "data: [DONE]"
                assert len(lines) > 3
                for _ in range(6):  # what one server stored is asked of that one
                    first = {"model": MODEL, "input": "Hello", "max_output_tokens": 2}
                    stored = client.post("/v1/responses", json=first).json()["id"]
                    more = {**first, "previous_response_id": stored}
                    reply = client.post("/v1/responses", json=more)
                    assert reply.status_code == 200, reply.text
                servers[0].send_signal(signal.SIGKILL)
                servers[0].wait()
                for _ in range(6):
                    ask(client, [{"role": "user", "content": "Still there?"}])
