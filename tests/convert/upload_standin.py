"""A stand-in for the part of the hub that takes uploads, on 127.0.0.1. Knows no models.

It answers what huggingface_hub asks for: POST /api/repos/create, /api/models/<repo>/preupload/main,
/<repo>.git/info/lfs/objects/batch and /api/models/<repo>/commit/main, and PUT of large files.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors",)


class UploadHub:
    """What arrived: `files` by name after a commit."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.refuse: int | None = None  # status of every answer
        self.url = ""


@contextmanager
def upload_hub() -> Iterator[UploadHub]:
    hub = UploadHub()

    class Handler(_Handler):
        owner = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: UploadHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._json({"id": "org/out", "sha": COMMIT, "siblings": []})

    def do_PUT(self) -> None:
        data = self._body()
        self.owner.blobs[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        if self.owner.refuse is not None:
            self._json({"error": "no"}, self.owner.refuse)
        elif path == "/api/repos/create":
            self.owner.created.append(json.loads(body))
            self._json({"url": f"{self.owner.url}/org/out", "name": "org/out", "id": "1"})
        elif path.endswith("/preupload/main"):
            self._json({"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif path.endswith("/objects/batch"):
            self._json(self._batch(json.loads(body)))
        elif path.endswith("/commit/main"):
            self._commit(body)
            url = f"{self.owner.url}/org/out/commit/{COMMIT}"
            self._json({"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self._json({}, 200)

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.owner.url}/put/{o['oid']}"}}}
            for o in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.owner.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.owner.files[value["path"]] = self.owner.blobs[value["oid"]]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
