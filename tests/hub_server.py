"""A Hub for tests: the routes by which models and datasets are downloaded and models pushed, in memory.

    with serve({"datasets": {"me/data": {"train.csv": b"..."}}, "models": {}}) as hub:
        subprocess.run(command, env={**os.environ, **hub.environment(tmp_path)})

`huggingface_hub` reads its environment when it is imported, so what talks to this server is a process of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]
TOKEN = "hf_dummy"  # of the user `me`
ID = r"(?P<id>[\w.-]+/[\w.-]+)"
AT = r"(/(?P<verb>revision|tree|paths-info|preupload|commit)/(?P<rev>[^/]+)(/(?P<path>.*))?)?"
API = re.compile(rf"/api/(?P<kind>models|datasets)/{ID}{AT}")
RESOLVE = re.compile(rf"/((?P<kind>datasets)/)?{ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
BATCH = re.compile(rf"/{ID}\.git/info/lfs/objects/batch")
BLOB = re.compile(r"/lfs/(?P<oid>[0-9a-f]{64})(?P<verify>/verify)?")
LARGE = (".safetensors", ".bin", ".onnx", ".png")  # what goes up by LFS


@dataclass
class Hub:
    """What the server holds, who may do what, and every request it got as `METHOD path`.

    Args:
        repos: kind (`models`, `datasets`) to id to files.
        users: token to its user, who may write to the repositories under that name and see the private ones.
        read_only: tokens that may not write.
        private: ids of the models that others do not see.
        blobs: what arrived by LFS, by its SHA-256; in a repository only once a commit names it.
        cut: how many of the next uploads by LFS are cut off in the middle.
    """

    repos: dict[str, dict[str, Files]]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=lambda: {TOKEN: "me"})
    read_only: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)
    cut: int = 0

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """The variables that send a process here, with its caches in `home`."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": token or ""}
        return {**own, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def commit(self, kind: str, repo: str) -> str:
        """The repository's one commit: another content has another hash."""
        digest = hashlib.sha1()
        for path, content in sorted(self.repos[kind][repo].items()):
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()


@contextmanager
def serve(repos: dict[str, dict[str, Files]], **given) -> Iterator[Hub]:
    """Serves `{"models": {id: {path: content}}, "datasets": {...}}` until the block ends. May be changed meanwhile.

    `given` are further fields of `Hub`.
    """
    hub = Hub(repos, **given)
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


class _Refused(Exception):
    """The answer to a request that is not granted: status, code and words."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        self.hub.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        path = unquote(url.path)
        try:
            blob = BLOB.fullmatch(path)
            if blob:  # before the body is read: it may be cut
                return self._blob(blob["oid"], verify=blob["verify"] is not None)
            body = self._body()
            user = self._user()
            if path == "/api/whoami-v2":
                if user is None:
                    raise _Refused(401, "", "Invalid username or password.")
                return self._json({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})
            if path == "/api/repos/create":
                return self._create(json.loads(body), user)
            if path == "/api/validate-yaml":
                return self._json({"errors": [], "warnings": []})
            if found := BATCH.fullmatch(path):
                self._check_may_write(found["id"], user)
                return self._batch(json.loads(body))
            found = API.fullmatch(path) or RESOLVE.fullmatch(path)
            if found is None:
                raise _Refused(404, "EntryNotFound", "")
            self._in_repo(found, parse_qs(url.query), body, user)
        except _Refused as refused:
            status, code, said = refused.args
            headers = {"X-Error-Code": code, "X-Error-Message": said}
            answer = json.dumps({"error": said or code}).encode()
            self._answer(status, answer, {name: value for name, value in headers.items() if value})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    # ---- Who asks --------------------------------------------------------------------------------------------

    def _user(self) -> str | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        token = given.removeprefix("Bearer ")
        if token not in self.hub.users:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        return self.hub.users[token]

    def _check_may_write(self, repo: str, user: str | None) -> None:
        if user is None:
            raise _Refused(401, "", "Invalid username or password.")
        if repo.split("/")[0] != user or self.headers["Authorization"].removeprefix("Bearer ") in self.hub.read_only:
            said = f"You don't have the rights to write to {repo}."
            raise _Refused(403, "", said)

    # ---- What is pushed --------------------------------------------------------------------------------------

    def _create(self, asked: dict, user: str | None) -> None:
        repo = f"{asked.get('organization') or user}/{asked['name']}"
        self._check_may_write(repo, user)
        answer = {"url": f"{self.hub.url}/{repo}", "name": repo, "id": "0" * 24}
        if repo in self.hub.repos.setdefault("models", {}):
            return self._answer(409, json.dumps({**answer, "error": "You already created this model repo"}).encode())
        self.hub.repos["models"][repo] = {}
        if asked.get("visibility") == "private" or asked.get("private"):
            self.hub.private.add(repo)
        self._json(answer)

    def _batch(self, asked: dict) -> None:
        objects = []
        for wanted in asked["objects"]:
            href = f"{self.hub.url}/lfs/{wanted['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            there = wanted["oid"] in self.hub.blobs
            objects.append({**wanted, "authenticated": True, **({} if there else {"actions": actions})})
        self._json({"transfer": "basic", "objects": objects})

    def _blob(self, oid: str, verify: bool) -> None:
        if verify:
            asked = json.loads(self._body())
            if asked["oid"] != oid or len(self.hub.blobs.get(oid, b"")) != asked["size"]:
                raise _Refused(404, "EntryNotFound", f"{oid} did not arrive whole")
            return self._json({})
        if self.hub.cut > 0:
            self.hub.cut -= 1
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        content = self._body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise _Refused(400, "", f"{oid} has another content")
        self.hub.blobs[oid] = content
        self._answer(200, b"")

    def _preupload(self, files: Files, asked: dict) -> None:
        found = []
        for file in asked["files"]:
            path = file["path"]
            mode, there = "lfs" if path.endswith(LARGE) else "regular", files.get(path)
            oid = None if there is None else _sha256(there) if mode == "lfs" else _git_oid(there)
            found.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": found})

    def _commit(self, repo: str, files: Files, body: bytes) -> None:
        changed = dict(files)
        for line in map(json.loads, body.splitlines()):
            key, value = line["key"], line["value"]
            if key == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.blobs:
                    raise _Refused(400, "", f"LFS pointer to {value['oid']}, which did not arrive")
                changed[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                del changed[value["path"]]
            elif key != "header":
                raise _Refused(400, "", f"unknown key {key}")
        files.clear()
        files.update(changed)
        oid = self.hub.commit("models", repo)
        url = f"{self.hub.url}/{repo}/commit/{oid}"
        self._json({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    # ---- What is read ----------------------------------------------------------------------------------------

    def _in_repo(self, found: re.Match, query: dict, body: bytes, user: str | None) -> None:
        kind, repo, verb = found["kind"] or "models", found["id"], found.groupdict().get("verb")
        hidden = kind == "models" and repo in self.hub.private and repo.split("/")[0] != user
        if repo not in self.hub.repos.get(kind, {}) or hidden:
            raise _Refused(401 if user is None and hidden else 404, "RepoNotFound", "Repository not found")
        files = self.hub.repos[kind][repo]
        if verb in ("preupload", "commit"):
            self._check_may_write(repo, user)
            return self._preupload(files, json.loads(body)) if verb == "preupload" else self._commit(repo, files, body)
        commit = self.hub.commit(kind, repo)
        if found["rev"] not in (None, "main", commit):
            raise _Refused(404, "RevisionNotFound", "")
        if found.re is RESOLVE:
            return self._file(files, found["path"], commit)
        entries = _entries(files)
        if verb == "paths-info":
            asked = json.loads(body)["paths"] if b"{" in body[:1] else parse_qs(body.decode())["paths"]
            return self._json([entry for entry in entries if entry["path"] in asked])
        if verb == "tree":
            folder = f"{found['path']}/" if found["path"] else ""
            inside = [entry for entry in entries if entry["path"].startswith(folder)]
            if folder and not inside:
                raise _Refused(404, "EntryNotFound", "")
            deep = "true" in query.get("recursive", ["false"])[0].lower()
            return self._json([entry for entry in inside if deep or "/" not in entry["path"][len(folder) :]])
        about = {"private": repo in self.hub.private, "tags": [], "downloads": 0}
        self._json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files], **about})

    def _file(self, files: Files, path: str, commit: str) -> None:
        if path not in files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        headers = {"ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"', "X-Repo-Commit": commit}
        self._answer(200, files[path], {**headers, "Accept-Ranges": "none"})

    # ---- HTTP ------------------------------------------------------------------------------------------------

    def _body(self) -> bytes:
        """The request's body, also where it comes in chunks, as the library sends what it makes as it goes."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _entries(files: Files) -> list[dict]:
    folders = sorted({"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)})
    listed = [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]
    for path, content in files.items():
        listed.append({"type": "file", "path": path, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)})
    return listed
