"""Serve the routes of the Hugging Face Hub that data sets, models and pushes need, over real HTTP on loopback.

with SmallHub({"lab/texts": {"train-0.jsonl": b"..."}}) as hub: run a command with hub.environment
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

TOKEN = "hf_of_the_small_hub"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(
    r"/api/(?:datasets|models)/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree|paths-info)/(?P<rest>[^?]*))?"
)
PUSHED = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
FILE = re.compile(r"/(?:datasets/)?(?P<name>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>[^?]+)")


class SmallHub:
    """A hub with `files` by repository and path. `failures` says how many of the next requests for a path get a 503.

    Pushes of a client with TOKEN are added to `files`; `private` lists the private repositories that pushes created.
    """

    def __init__(
        self, files: Mapping[str, Mapping[str, bytes]] | None = None, *, failures: Mapping[str, int] | None = None
    ) -> None:
        self.files = {name: dict(each) for name, each in (files or {}).items()}
        self.private: list[str] = []
        self.large: dict[str, bytes] = {}  # by sha256, uploaded before a commit names them
        self.failures = Counter(failures or {})
        self.asked = Counter[str]()  # number of requests by path
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._thread = threading.Thread(target=self._server.serve_forever, name="small-hub", daemon=True)

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with its cache in `home`."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: SmallHub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def do_GET(self) -> None:
        if found := FILE.match(self.path):
            self._file(found["name"], found["path"])
        elif found := API.match(self.path):
            self._about(found["name"], found["what"] or "revision", found["rest"] or "")
        else:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self._body()
        self._answer(HTTPStatus.OK, b"", {})

    def do_POST(self) -> None:
        asked = self._body().decode()
        is_push = bool(PUSHED.match(self.path)) or self.path.endswith(("/repos/create", "/objects/batch"))
        if is_push and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._error(HTTPStatus.UNAUTHORIZED, "Unauthorized")
        elif self.path == "/api/repos/create":
            self._create(json.loads(asked))
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            self._large_files(json.loads(asked)["objects"])
        elif found := PUSHED.match(self.path):
            if found["what"] == "preupload":
                self._upload_modes(json.loads(asked)["files"])
            else:
                self._commit(found["name"], [json.loads(line) for line in asked.splitlines()])
        elif (found := API.match(self.path)) and found["what"] == "paths-info":
            files = self.hub.files.get(found["name"], {})
            self._json([self._entry(path, files[path]) for path in files if path in asked])
        else:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because tests read `asked`."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        exists = name in self.hub.files
        if not exists:
            self.hub.files[name] = {}
            if asked.get("visibility") == "private" or asked.get("private"):
                self.hub.private.append(name)
        self._json({"url": f"{self._address}/{name}"}, HTTPStatus.CONFLICT if exists else HTTPStatus.OK)

    def _upload_modes(self, files: list[dict[str, Any]]) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        self._json({"files": modes})

    def _large_files(self, objects: list[dict[str, Any]]) -> None:
        ways = [{**each, "actions": {"upload": {"href": f"{self._address}/large/{each['oid']}"}}} for each in objects]
        self._json({"transfer": "basic", "objects": ways})

    def _commit(self, name: str, operations: list[dict[str, Any]]) -> None:
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.large[value["oid"]]
        url = f"{self._address}/{name}/commit/{COMMIT}"
        self._json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _about(self, name: str, what: str, rest: str) -> None:
        files = self.hub.files.get(name)
        if files is None:
            self._error(HTTPStatus.NOT_FOUND, "RepoNotFound")
        elif what == "tree":
            self._json(
                self._listing(files, folder=rest.partition("/")[2], recursive="recursive=true" in self.path.lower())
            )
        else:
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})

    def _file(self, name: str, path: str) -> None:
        content = self.hub.files.get(name, {}).get(path)
        self.hub.asked[path] += 1
        if content is None:
            return self._error(HTTPStatus.NOT_FOUND, "EntryNotFound")
        if self.hub.failures[path] > 0:
            self.hub.failures[path] -= 1
            return self._error(HTTPStatus.SERVICE_UNAVAILABLE, "Busy")
        start, stop, status = 0, len(content), HTTPStatus.OK
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(part[1]), min(stop, int(part[2] or stop) + 1)
            status = HTTPStatus.PARTIAL_CONTENT
        headers = {"ETag": f'"{path}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(status, content[start:stop], headers)

    def _listing(self, files: Mapping[str, bytes], *, folder: str, recursive: bool) -> list[dict[str, Any]]:
        start = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(start)}
        folders = {start + path[len(start) :].partition("/")[0] for path in inside if "/" in path[len(start) :]}
        here = [path for path in inside if recursive or "/" not in path[len(start) :]]
        found = [{"type": "directory", "path": path, "size": 0, "oid": COMMIT} for path in sorted(folders)]
        return found + [self._entry(path, inside[path]) for path in here]

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": COMMIT}

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: HTTPStatus, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code})

    def _answer(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
