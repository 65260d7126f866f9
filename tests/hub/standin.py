"""A stand-in for the hub on 127.0.0.1: what huggingface_hub asks for, and faults to order.

It answers GET /api/models?search=…&filter=…, GET /api/models/<repo>[/revision/<rev>], GET
/api/models/<repo>/tree/<rev>, and HEAD and GET /<repo>/resolve/<rev>/<file> with ETag,
X-Repo-Commit, Range and, for weights, the headers of large files and a redirect to another host,
where /cdn/<sha256> is, as the real one does.
"""

import hashlib
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", "tokenizer.json")
ENDLESS_BYTES = 64 << 20


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    tags: tuple[str, ...] = ("mlx", "safetensors")
    downloads: int = 0

    def knows(self, revision: str) -> bool:
        return revision in {self.commit, *self.revisions}


@dataclass
class Faults:
    """Set before a request. Counters go down with each use."""

    status: int | None = None  # of every request, with `code` as X-Error-Code
    code: str | None = None
    busy: int = 0  # answer that many requests with `busy_status`
    busy_status: int = 503
    retry_after: str = "0"  # what a busy hub says
    cut_after: list[int] = field(default_factory=list)  # one body each: bytes, then hang up
    damage: bool = False  # flip a bit of every large body
    endless: bool = False  # a large body goes on and on, up to ENDLESS_BYTES
    no_ranges: bool = False  # ignore Range
    short_length: int = 0  # announce and send that many bytes less than there are, once
    gate_files: bool = False  # files are gated, the listing is not
    gone: frozenset[str] = frozenset()  # files that are listed, but not there
    on_chunk: Callable[[], None] | None = None  # called before each KiB of a large body


class HubHandler(BaseHTTPRequestHandler):
    hub: "StandIn"
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route(body=False)

    def do_GET(self) -> None:
        self._route(body=True)

    def _route(self, *, body: bool) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        asked_range = self.headers.get("Range")
        self.hub.log.append(f"{self.command} {path}" + (f" {asked_range}" if asked_range else ""))
        if self.headers.get("Authorization"):
            self.hub.authorised.add(path)
        if self._fault(path):
            return
        if path.startswith("/cdn/"):
            return self._large(path.removeprefix("/cdn/"), body=body)
        if path == "/api/models":
            return self._search(urllib.parse.parse_qs(self.path.partition("?")[2]))
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"))
        repo_id, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        return self._resolve(repo_id, revision, name, body=body)

    def _fault(self, path: str) -> bool:
        faults = self.hub.faults
        if faults.busy > 0:
            faults.busy -= 1
            self._answer(faults.busy_status, b"", {"Retry-After": faults.retry_after})
            return True
        if faults.status is not None:
            self._error(faults.status, faults.code)
            return True
        if faults.gate_files and not path.startswith("/api/"):
            self._error(403, "GatedRepo")
            return True
        return False

    def _api(self, rest: str) -> None:
        repo_id = "/".join(rest.split("/")[:2])
        kind, _, revision = rest[len(repo_id) :].lstrip("/").partition("/")
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self._error(404, "RepoNotFound")
        if not repo.knows(revision or "main"):
            return self._error(404, "RevisionNotFound")
        if kind == "tree":
            return self._json([_entry(name, body) for name, body in repo.files.items()])
        siblings = [{"rfilename": name, **_sizes(name, body)} for name, body in repo.files.items()]
        return self._json({"id": repo_id, "sha": repo.commit, "siblings": siblings})

    def _search(self, query: dict[str, list[str]]) -> None:
        words = query.get("search", [""])[0].lower().split()
        tags = {tag for given in query.get("filter", []) for tag in given.split(",")}
        result = [
            {
                **{"_id": "0" * 24, "id": repo_id, "modelId": repo_id, "likes": 3, "gated": False},
                **{"downloads": repo.downloads, "tags": list(repo.tags)},
                **{"lastModified": "2026-10-01T12:00:00.000Z", "pipeline_tag": "text-generation"},
                "safetensors": {"parameters": {"BF16": 1000}, "total": 1000},
            }
            for repo_id, repo in self.hub.repos.items()
            if all(word in repo_id.lower() for word in words) and tags <= set(repo.tags)
        ]
        self._json(sorted(result, key=lambda item: -int(str(item["downloads"]))))

    def _resolve(self, repo_id: str, revision: str, name: str, *, body: bool) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self._error(404, "RepoNotFound")
        if not repo.knows(revision):
            return self._error(404, "RevisionNotFound")
        if name not in repo.files or name in self.hub.faults.gone:
            return self._error(404, "EntryNotFound")
        data = repo.files[name]
        git_hash = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{git_hash}"'}
        if not name.endswith(LARGE):
            return self._answer(200, data, headers, body=body)
        sha256 = _sha256(data)
        headers |= {
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{sha256}"',
            "Location": f"{self.hub.cdn}/cdn/{sha256}",
        }
        return self._answer(302, b"", headers)

    def _large(self, sha256: str, *, body: bool) -> None:
        data = next(
            data
            for repo in self.hub.repos.values()
            for data in repo.files.values()
            if _sha256(data) == sha256
        )
        faults = self.hub.faults
        if faults.damage:
            data = bytes([data[0] ^ 1]) + data[1:]
        start, headers, status = 0, {"Accept-Ranges": "bytes"}, 200
        asked, end = self.headers.get("Range"), len(data)
        if asked and not faults.no_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            status = 206
        end -= faults.short_length
        faults.short_length = 0
        if faults.endless:
            data, end = data + bytes(ENDLESS_BYTES), end + ENDLESS_BYTES
        self._answer(status, data[start:end], headers, body=body, large=True)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str | None) -> None:
        self._answer(status, b"", {"X-Error-Code": code} if code else {})

    def _answer(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        body: bool = True,
        large: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self._send(data, large=large)

    def _send(self, data: bytes, *, large: bool) -> None:
        faults = self.hub.faults
        cut = faults.cut_after.pop(0) if large and faults.cut_after else None
        if cut is not None:
            data = data[:cut]
            self.close_connection = True
        for start in range(0, len(data), 1024):
            if large and faults.on_chunk:
                faults.on_chunk()
            piece = data[start : start + 1024]
            self.hub.sent[self.path] += len(piece)  # first: a client may ask at once
            try:
                self.wfile.write(piece)
            except (BrokenPipeError, ConnectionResetError):
                self.hub.sent[self.path] -= len(piece)
                self.close_connection = True
                return


class StandIn:
    """with StandIn({"org/name": Repo(files)}) as hub: hub.url, hub.log, hub.faults"""

    handler: type[HubHandler] = HubHandler

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.faults = Faults()
        self.log: list[str] = []  # "GET /path" and " bytes=…" where a Range was asked for
        self.sent: Counter[str] = Counter()  # body bytes by path
        self.authorised: set[str] = set()  # paths that were asked for with a token
        owner = self

        class Handler(self.handler):  # type: ignore[misc,name-defined]
            hub = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def cdn(self) -> str:
        return f"http://localhost:{self._server.server_address[1]}"

    def asked_for(self, part: str) -> list[str]:
        return [line for line in self.log if part in line]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _sizes(name: str, body: bytes) -> dict[str, object]:
    """A file as the listing of a repository has it."""
    sizes: dict[str, object] = {"size": len(body), "blobId": hashlib.sha1(body).hexdigest()}
    return sizes | (
        {"lfs": {"sha256": _sha256(body), **_lfs(body)}} if name.endswith(LARGE) else {}
    )


def _entry(name: str, body: bytes) -> dict[str, object]:
    """A file as the tree of a repository has it."""
    oid = hashlib.sha1(body).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(body), "oid": oid}
    return entry | ({"lfs": {"oid": _sha256(body), **_lfs(body)}} if name.endswith(LARGE) else {})


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _lfs(body: bytes) -> dict[str, int]:
    return {"size": len(body), "pointerSize": 100}
