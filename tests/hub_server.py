"""A Hub for tests: the few routes by which models and datasets are downloaded, on the loopback, from memory.

    with serve({"datasets": {"me/data": {"train.csv": b"..."}}, "models": {}}) as hub:
        subprocess.run(command, env={**os.environ, **hub.environment(tmp_path)})

`huggingface_hub` reads its environment when it is imported, so what talks to this server is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]
ID = r"(?P<id>[\w.-]+/[\w.-]+)"
AT = r"(/(?P<verb>revision|tree|paths-info)/(?P<rev>[^/]+)(/(?P<path>.*))?)?"
API = re.compile(rf"/api/(?P<kind>models|datasets)/{ID}{AT}")
RESOLVE = re.compile(rf"/((?P<kind>datasets)/)?{ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)")


@dataclass
class Hub:
    """What the server holds, and every request it got as `METHOD path`."""

    repos: Mapping[str, Mapping[str, Files]]
    url: str = ""
    requests: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables that send a process here, with its caches in `home`."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_dummy"}
        return {**own, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def commit(self, kind: str, repo: str) -> str:
        """The repository's one commit: another content has another hash."""
        digest = hashlib.sha1()
        for path, content in sorted(self.repos[kind][repo].items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


@contextmanager
def serve(repos: Mapping[str, Mapping[str, Files]]) -> Iterator[Hub]:
    """Serves `{"models": {id: {path: content}}, "datasets": {...}}` until the block ends. May be changed meanwhile."""
    hub = Hub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.hub.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        path = unquote(url.path)
        found = API.fullmatch(path) or RESOLVE.fullmatch(path)
        if found is None:
            return self._missing("EntryNotFound")
        kind, repo = found["kind"] or "models", found["id"]
        if repo not in self.hub.repos.get(kind, {}):
            return self._missing("RepoNotFound")
        files, commit = self.hub.repos[kind][repo], self.hub.commit(kind, repo)
        if found["rev"] not in (None, "main", commit):
            return self._missing("RevisionNotFound")
        if found.re is RESOLVE:
            return self._file(files, found["path"], commit)
        entries = _entries(files)
        if found["verb"] == "paths-info":
            asked = json.loads(body)["paths"] if b"{" in body[:1] else parse_qs(body.decode())["paths"]
            return self._json([entry for entry in entries if entry["path"] in asked])
        if found["verb"] == "tree":
            folder = f"{found['path']}/" if found["path"] else ""
            inside = [entry for entry in entries if entry["path"].startswith(folder)]
            if folder and not inside:
                return self._missing("EntryNotFound")
            deep = "true" in parse_qs(url.query).get("recursive", ["false"])[0].lower()
            return self._json([entry for entry in inside if deep or "/" not in entry["path"][len(folder) :]])
        siblings = [{"rfilename": name} for name in files]
        self._json({"id": repo, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    do_HEAD = do_POST = do_GET

    def _file(self, files: Files, path: str, commit: str) -> None:
        if path not in files:
            return self._missing("EntryNotFound", commit)
        headers = {"ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"', "X-Repo-Commit": commit}
        self._answer(200, files[path], {**headers, "Accept-Ranges": "none"})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, commit: str = "") -> None:
        self._answer(404, code.encode(), {"X-Error-Code": code, "X-Repo-Commit": commit})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def _entries(files: Files) -> list[dict]:
    folders = sorted({"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)})
    listed = [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]
    for path, content in files.items():
        listed.append({"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)})
    return listed
