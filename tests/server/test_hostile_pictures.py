"""Pictures and videos that take a decoder long: texts do not wait, and the server ends soon."""

import base64
import json
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from socket import create_connection, socket
from typing import Any

import psutil
import pytest
import raw_http
from test_serve_process import Process, post, start, url_in

from tests.images.hostile import gif_of_large_frames, heic, jpeg_of_many_scans, png_of_one_bit
from tests.seeing_folder import seeing_folder
from tests.waiting import wait_until

pytestmark = pytest.mark.ci
CLIENTS = 4  # of each kind: twice as many as processes that decode
LIGHT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
HOSTILE = {
    "a JPEG of many scans": ("image", jpeg_of_many_scans(4000, 3000)),
    "a PNG of one bit": ("image", png_of_one_bit(9400, 9400)),
    "a large HEIC": ("image", heic()),
    "a video": ("video", gif_of_large_frames(5900, 100)),
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, str]]:
    for package in ("av", "pillow_heif"):
        pytest.importorskip(package)
    folder = seeing_folder(tmp_path_factory.mktemp("see"), videos=True)
    environment = {**os.environ, "MLXINFER_SERVE_DRAIN_S": "1"}
    process = start("-m", str(folder), "--port", "0", env=environment)
    try:
        url = url_in(process)
        post(url, LIGHT).close()  # compiles and imports what every request needs
        yield process, url
    finally:
        process.kill()
        process.communicate()


def send(url: str, name: str) -> socket:
    """Send a request with a hostile file, and do not wait for its answer."""
    kind, data = HOSTILE[name]
    file = {"url": f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"}
    content: list[Any] = [{"type": f"{kind}_url", f"{kind}_url": file}]
    body = json.dumps({**LIGHT, "messages": [{"role": "user", "content": content}]}).encode()
    client = create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)
    client.sendall(raw_http.post("/v1/chat/completions", body))
    return client


def decoders(server: psutil.Process) -> list[psutil.Process]:
    """The processes that decode, or have done so."""
    decoders = []
    for child in server.children():
        with suppress(psutil.Error):
            if "mlxinfer.images.process" in child.cmdline() and seconds_of(child) > 0.1:
                decoders.append(child)
    return decoders


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def decoding_seconds(server: psutil.Process) -> float:
    """CPU seconds of all processes of a server, of those that have ended too."""
    ended = server.cpu_times()
    running = 0.0
    for child in server.children():
        with suppress(psutil.Error):
            running += seconds_of(child)
    return running + float(ended.children_user + ended.children_system)


def seconds_of_reaped() -> float:
    """CPU seconds of all processes that this one has waited for, and of theirs."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime


def wait_for_decoders(server: psutil.Process) -> None:
    wait_until(lambda: decoders(server), 300, pause_s=0.02)


@pytest.mark.alike
@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_does_not_wait_for_pictures(name: str, serving: tuple[Process, str]) -> None:
    process, url = serving
    server = psutil.Process(process.pid)
    used, memory = seconds_of(server), server.memory_info().rss
    with ExitStack() as clients:
        for _ in range(CLIENTS):
            clients.enter_context(send(url, name))
        wait_for_decoders(server)
        decoded = decoding_seconds(server)
        with post(url, LIGHT) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 2
        assert decoding_seconds(server) - decoded < 10, "the text waits for pictures"
    assert seconds_of(server) - used < 3, "the server itself decodes"
    assert server.memory_info().rss - memory < 200 << 20


def test_the_server_ends_beside_pictures(serving: tuple[Process, str]) -> None:
    process, url = serving
    server = psutil.Process(process.pid)
    with ExitStack() as staying:
        with ExitStack() as leaving:
            for name in HOSTILE:
                staying.enter_context(send(url, name))
                leaving.enter_context(send(url, name))
            wait_for_decoders(server)
        decoding, reaped = server.children(), seconds_of_reaped()
        used = seconds_of(server) + decoding_seconds(server)
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert seconds_of_reaped() - reaped - used < 15, "the end waits for pictures"
        psutil.wait_procs(decoding, timeout=5)
        assert not [child for child in decoding if child.is_running()]
