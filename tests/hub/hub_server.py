"""A small Hub on loopback for the real `huggingface_hub` client: reading, uploading, listing, and trouble on request.

It keeps what the client can see of the real one: commits and refs, `resolve` with ETag and commit headers, LFS files
behind a redirect to another host, ranges, error codes in `X-Error-Code`, uploads by preupload, LFS batch and commit.
"""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

FRONT_MATTER = re.compile(r"---\n(.*?)\n---", re.DOTALL)
BIG = (".safetensors", ".bin", ".pt", ".png")  # what goes to LFS
LICENCES = {"apache-2.0", "mit", "llama3.3", "other"}
TASKS = {"text-generation"}


@dataclass
class Repo:
    """Commits are immutable: a commit is the table of its files."""

    id: str
    private: bool = False
    gated: bool = False
    downloads: int = 0
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main", title: str = "") -> str:
        """A new commit on `branch` with exactly `files`. Returns its sha."""
        state = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())
        sha = hashlib.sha1(repr((self.id, len(self.commits), state)).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        self.titles[sha] = title
        return sha

    def sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.refs.get(revision, revision)]

    def card(self, sha: str) -> dict[str, Any]:
        """The front matter of README.md."""
        found = FRONT_MATTER.match(self.commits[sha].get("README.md", b"").decode())
        return yaml.safe_load(found[1]) or {} if found else {}

    def info(self, sha: str) -> dict[str, Any]:
        """What `/api/models` says of it: the tags are made of the front matter, as on the Hub."""
        card = self.card(sha)
        tags = list(card.get("tags") or [])
        tags += [card[key] for key in ("library_name", "pipeline_tag") if key in card]
        tags += [f"license:{card['license']}"] if "license" in card else []
        if base := card.get("base_model"):
            kind = card.get("base_model_relation", "finetune")
            tags += [f"base_model:{base}", f"base_model:{kind}:{base}"]
        return {
            "_id": sha[:24],
            "id": self.id,
            "modelId": self.id,
            "sha": sha,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "downloads": self.downloads,
            "likes": 0,
            "tags": tags,
            "pipeline_tag": card.get("pipeline_tag"),
            "library_name": card.get("library_name"),
            "cardData": card,
            "siblings": [{"rfilename": path} for path in sorted(self.commits[sha])],
        }


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with its query
    headers: dict[str, str]  # names in lower case
    host: str  # by which name the client called


@dataclass
class Hub:
    """State that tests set up and look at. `faults`: part of a path -> what happens to the requests that have it."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS, by sha256
    users: dict[str, dict[str, Any]] = field(default_factory=dict)  # by token
    requests: list[Request] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)  # path part -> the connection ends after so many bytes, once
    short: dict[str, int] = field(default_factory=dict)  # path part -> only so many bytes are there, whatever was said
    fail: dict[str, int] = field(default_factory=dict)  # path part -> status
    page: int = 2  # models of a page of a list

    def repo(self, id: str, files: dict[str, bytes] | None = None, **kwargs: Any) -> Repo:
        """A repository with one commit."""
        self.repos[id] = repo = Repo(id, **kwargs)
        repo.commit(files or {}, title="initial commit")
        for data in (files or {}).values():
            self.objects[hashlib.sha256(data).hexdigest()] = data
        return repo

    def user(self, token: str, name: str, write: bool = True, sees: tuple[str, ...] = ()) -> None:
        """A token; `sees`: gated or private repositories that it may read."""
        self.users[token] = {"name": name, "write": write, "sees": sees}

    def seen(self, method: str, part: str = "") -> list[str]:
        """Paths of the requests with this method whose path holds `part`."""
        return [request.path for request in self.requests if request.method == method and part in request.path]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    # what is asked

    def handle_request(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.body = self.rfile.read(int(headers.get("content-length") or 0))
        if headers.get("transfer-encoding") == "chunked":
            self.body = self.read_chunks()
        hub.requests.append(Request(self.command, self.path, headers, headers.get("host", "").split(":")[0]))
        self.query = parse_qs(url.query)
        for part, status in hub.fail.items():
            if part in self.path:
                self.json({"error": "because of that"}, status)
                return
        token = headers.get("authorization", "").removeprefix("Bearer ")
        self.user = hub.users.get(token)
        if token and self.user is None:
            message = "Invalid credentials in Authorization header"
            self.json({"error": message}, 401, {"X-Error-Message": message})
            return
        path = unquote(url.path)
        for methods, pattern, answer in self.ROUTES:
            if self.command in methods and (found := re.fullmatch(pattern, path)):
                answer(self, **found.groupdict())
                return
        self.json({"error": f"{self.command} {path} is not served here"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    # how it is answered

    def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def error(self, code: str, status: int, message: str, commit: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.json({"error": message}, status, headers | ({"X-Repo-Commit": commit} if commit else {}))

    def send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for part, count in list(self.hub.cut.items()):
            if part in self.path:
                del self.hub.cut[part]
                self.wfile.write(data[:count])
                self.close_connection = True
                return
        self.wfile.write(data)

    def content(self, data: bytes, headers: dict[str, str]) -> None:
        """A file, or the range of it that was asked for."""
        for part, count in self.hub.short.items():
            data = data[:count] if part in self.path else data
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = headers | {"Accept-Ranges": "bytes"}
        if found is None:
            self.send(data, 200, headers)
            return
        first, last = int(found[1]), int(found[2] or len(data) - 1)
        if first >= len(data):
            self.send(b"", 416, {"Content-Range": f"bytes */{len(data)}"})
            return
        self.send(data[first : last + 1], 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    # who may

    def find(self, id: str, write: bool = False, open: bool = True) -> Repo | None:
        """The repository, or None once the client has been told why not. `open`: gates do not count."""
        repo = self.hub.repos.get(id)
        sees = self.user is not None and (id in self.user["sees"] or id.split("/")[0] == self.user["name"])
        if repo is None or (repo.private and not sees):
            self.error("RepoNotFound", 404 if self.user else 401, "Repository not found")
            return None
        if write and not (sees and self.user and self.user["write"]):
            self.json({"error": "You don't have the rights"}, 403, {"X-Error-Message": "You don't have the rights"})
            return None
        if repo.gated and not open and not sees:
            asked = "You are not in the authorized list" if self.user else "You must be authenticated"
            self.error("GatedRepo", 403 if self.user else 401, f"Access to model {id} is restricted. {asked}.")
            return None
        return repo

    def commit_of(self, repo: Repo, revision: str) -> str | None:
        sha = repo.sha(revision)
        if sha is None:
            self.error("RevisionNotFound", 404, f"Invalid rev id: {revision}")
        return sha

    # reading

    def model_info(self, id: str, revision: str | None) -> None:
        if (repo := self.find(id)) and (sha := self.commit_of(repo, revision or "main")):
            info = repo.info(sha)
            if self.query.get("blobs"):
                for file in info["siblings"]:
                    file["size"] = len(repo.commits[sha][file["rfilename"]])
            self.json(info)

    def models(self) -> None:
        """The public repositories that have every tag asked for, in pages."""
        tags, skip = self.query.get("filter", []), int(self.query.get("cursor", ["0"])[0])
        found = [repo.info(repo.refs["main"]) for repo in self.hub.repos.values() if not repo.private]
        found = [info for info in found if set(tags) <= set(info["tags"])]
        found.sort(key=lambda info: -info["downloads"])
        headers = {}
        if len(found) > skip + self.hub.page:
            rest = "&".join(part for part in urlsplit(self.path).query.split("&") if not part.startswith("cursor="))
            headers["Link"] = f'<{self.hub.url}/api/models?{rest}&cursor={skip + self.hub.page}>; rel="next"'
        self.json(found[skip : skip + self.hub.page], headers=headers)

    def tree(self, id: str, revision: str, folder: str | None) -> None:
        if not (repo := self.find(id)) or not (sha := self.commit_of(repo, revision)):
            return
        files = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in sorted(repo.commits[sha].items())
            if path.startswith(f"{folder or ''}/".lstrip("/"))
        ]
        if folder and not files:
            self.error("EntryNotFound", 404, f"{folder} does not exist", sha)
        else:
            self.json(files)

    def resolve(self, id: str, revision: str, path: str) -> None:
        if not (repo := self.find(id, open=False)) or not (sha := self.commit_of(repo, revision)):
            return
        data = repo.commits[sha].get(path)
        if data is None:
            self.error("EntryNotFound", 404, "Entry not found", sha)
            return
        headers = {"X-Repo-Commit": sha}
        if not path.endswith(BIG):
            self.content(data, headers | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
            return
        oid = hashlib.sha256(data).hexdigest()
        cdn = self.hub.url.replace("127.0.0.1", "localhost")  # another host: no token may follow
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data)), "Location": f"{cdn}/cdn/{oid}/{path}"}
        self.send(b"", 302, headers)

    def cdn(self, oid: str) -> None:
        if oid in self.hub.objects:
            self.content(self.hub.objects[oid], {"ETag": f'"{oid}"'})
        else:
            self.json({}, 404)

    # writing

    def whoami(self) -> None:
        if self.user is None:
            self.json({"error": "Invalid username or password."}, 401)
            return
        role = "write" if self.user["write"] else "read"
        self.json({"type": "user", "name": self.user["name"], "auth": {"accessToken": {"role": role}}, "orgs": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = asked.get("organization") or (self.user or {}).get("name")
        id = f"{name}/{asked['name']}"
        if self.user is None:
            self.json({"error": "Invalid username or password."}, 401)
        elif not self.user["write"] or name != self.user["name"]:
            message = f"You don't have the rights to create a model under the namespace {name!r}"
            self.json({"error": message}, 403, {"X-Error-Message": message})
        elif id in self.hub.repos:
            message = "You already created this model repo"
            self.json({"error": message, "url": f"{self.hub.url}/{id}", "name": id}, 409)
        else:
            self.hub.repo(id, private=asked.get("visibility") == "private")
            self.json({"url": f"{self.hub.url}/{id}", "name": id})

    def branch(self, id: str, revision: str) -> None:
        if repo := self.find(id, write=True):
            if revision in repo.refs:
                self.json({"error": "Reference already exists"}, 409)
                return
            repo.refs[revision] = repo.refs["main"]
            self.json({})

    def validate(self) -> None:
        """As much of the Hub's own checks of a card as its documentation states."""
        found = FRONT_MATTER.match(json.loads(self.body)["content"])
        card = yaml.safe_load(found[1]) if found else {}
        errors = []
        if card.get("license", "other") not in LICENCES:
            errors.append(f'"license" must be one of {sorted(LICENCES)}')
        if card.get("pipeline_tag") not in TASKS | {None}:
            errors.append(f'"pipeline_tag" must be one of {sorted(TASKS)}')
        if "base_model" in card and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(card["base_model"])):
            errors.append('"base_model" with value is not valid. Use a model id from the Hub')
        for key in ("tags", "datasets", "metrics"):
            if not all(isinstance(item, str) for item in card.get(key, [])) or not isinstance(card.get(key, []), list):
                errors.append(f'"{key}" must be an array of strings')
        if card.get("base_model_relation", "adapter") not in ("adapter", "finetune", "merge", "quantized"):
            errors.append('"base_model_relation" must be one of [adapter, finetune, merge, quantized]')
        problems = [{"message": message} for message in errors]
        self.json({"errors": problems, "warnings": []}, 400 if errors else 200)

    def preupload(self, id: str, revision: str) -> None:
        if self.find(id, write="create_pr" not in self.query):
            self.json(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(BIG) else "regular",
                            "shouldIgnore": False,
                            "oid": None,
                        }
                        for file in json.loads(self.body)["files"]
                    ]
                }
            )

    def batch(self, id: str) -> None:
        if self.find(id) is None:
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                answer["actions"] = {
                    "upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"},
                    "verify": {"href": f"{self.hub.url}/{id}.git/info/lfs/objects/verify"},
                }
            objects.append(answer)
        self.json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.json({"error": "The content does not have this sha256"}, 400)
            return
        self.hub.objects[oid] = self.body
        self.send(b"")

    def verify(self, id: str) -> None:
        asked = json.loads(self.body)
        there = len(self.hub.objects.get(asked["oid"], b"")) == asked["size"]
        self.json({}, 200 if there else 404)

    def commit(self, id: str, revision: str) -> None:
        proposed = "create_pr" in self.query
        if not (repo := self.find(id, write=not proposed)) or not (sha := self.commit_of(repo, revision)):
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repo.commits[sha])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.objects[value["oid"]]
        branch = f"refs/pr/{len(repo.refs)}" if proposed else revision
        new = repo.commit(files, branch, lines[0]["value"]["summary"])
        answer = {"success": True, "commitOid": new, "commitUrl": f"{self.hub.url}/{id}/commit/{new}", "hookOutput": ""}
        if proposed:
            answer["pullRequestUrl"] = f"{self.hub.url}/{id}/discussions/{len(repo.refs) - 1}"
        self.json(answer)

    ID = r"(?P<id>[\w.-]+/[\w.-]+?)"
    REVISION = r"(?P<revision>(?:refs/pr/)?[^/]+)"
    ROUTES = (
        (("GET",), "/api/models", models),
        (("GET",), "/api/whoami-v2", whoami),
        (("POST",), "/api/repos/create", create),
        (("POST",), "/api/validate-yaml", validate),
        (("GET",), rf"/api/models/{ID}/tree/{REVISION}(?:/(?P<folder>.+))?", tree),
        (("GET",), rf"/api/models/{ID}(?:/revision/(?P<revision>.+))?", model_info),
        (("POST",), rf"/api/models/{ID}/branch/(?P<revision>.+)", branch),
        (("POST",), rf"/api/models/{ID}/preupload/(?P<revision>.+)", preupload),
        (("POST",), rf"/api/models/{ID}/commit/(?P<revision>.+)", commit),
        (("POST",), rf"/{ID}\.git/info/lfs/objects/batch", batch),
        (("POST",), rf"/{ID}\.git/info/lfs/objects/verify", verify),
        (("PUT",), r"/lfs/(?P<oid>\w+)", put),
        (("GET", "HEAD"), r"/cdn/(?P<oid>\w+)/.*", cdn),
        (("GET", "HEAD"), rf"/{ID}/resolve/{REVISION}/(?P<path>.+)", resolve),
    )


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True  # a client may keep its connection


@contextmanager
def serve() -> Iterator[Hub]:
    """A Hub that listens until the block ends."""
    hub = Hub()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
