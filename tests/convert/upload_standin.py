"""The part of a stand-in hub that takes uploads. Knows no models.

It answers what huggingface_hub asks for: POST /api/repos/create, /api/models/<repo>/preupload/main,
/<repo>.git/info/lfs/objects/batch and /api/models/<repo>/commit/main, and PUT of large files.
"""

import base64
import hashlib
import json
from typing import Any

from hub.standin import COMMIT, HubHandler, Repo, StandIn

REPO = "org/out"


class UploadHandler(HubHandler):
    hub: "UploadHub"

    def do_PUT(self) -> None:
        data = self._body()
        self.hub.blobs[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        url = f"{self.hub.url}/{REPO}"
        if self._fault(path):
            return
        if path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            self._json({"url": url, "name": REPO, "id": "1"})
        elif path.endswith("/preupload/main"):
            self._json({"files": [_mode(file["path"]) for file in json.loads(body)["files"]]})
        elif path.endswith("/objects/batch"):
            puts = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/put/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": puts})
        elif path.endswith("/commit/main"):
            self._commit(body)
            self._json({"commitUrl": f"{url}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._json({})

    def _commit(self, body: bytes) -> None:
        for entry in map(json.loads, body.splitlines()):
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.blobs[value["oid"]]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


class UploadHub(StandIn):
    """What arrived: `files` by name after a commit."""

    handler = UploadHandler

    def __init__(self) -> None:
        super().__init__({REPO: Repo({})})
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []


def _mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
