"""HTTP by hand: bytes to a socket, bytes back. For what a client library would not send."""

import re
import socket

from live_server import LiveServer


def exchange(server: LiveServer, request: bytes) -> bytes:
    """Send these bytes and read until the server closes, or falls silent after its answer."""
    with connect(server) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> bytes:
    """One answer with a content-length, or all that comes until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
        head, result, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head)
        if result and length and len(body) >= int(length.group(1)):
            break
    return data


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A POST request with a JSON body; `headers` are added as they are."""
    lines = [
        f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json",
        f"content-length: {len(body) if length is None else length}", *headers,
    ]  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
