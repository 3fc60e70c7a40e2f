"""A Hub on loopback: what downloads from huggingface.co and uploads to it use of its HTTP interface, over a folder.

    python tests/hub_server.py --root FOLDER      prints its port P; then HF_ENDPOINT=http://127.0.0.1:P HF_TOKEN=secret

Repositories are folders <root>/{models,datasets}/<owner>/<name>, a branch other than main is <name>@<branch>, with "--"
for slashes, and each has one commit. Uploads need the token, and may only go to "me". As on the Hub, the client asks
first how to send each file: small texts go into the commit, all else through the LFS store. Only the standard library.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TEXTS = (".json", ".jsonl", ".md", ".csv")
FILE = re.compile(r"/(datasets/)?([^/]+)/([^/]+)/resolve/(refs/[^/]+/[^/]+|[^/]+)/(.+)")
API = re.compile(r"/api/(models|datasets)/([^/]+)/([^/]+)(?:/([^/]+)(?:/(refs/[^/]+/[^/]+|[^/]+)(?:/(.+))?)?)?")


class Refusal(Exception):
    """A status, and the code that tells the client what is missing."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass  # the tests' output is long enough

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        try:
            self.route(unquote(url.path), parse_qs(url.query), body)
        except Refusal as refusal:
            self.reply(refusal.args[0], {"error": refusal.args[1]}, {"X-Error-Code": refusal.args[1]})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def reply(self, status: int, content, headers: dict | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self, path: str, query: dict, body: bytes) -> None:
        server = self.server
        if path == "/api/validate-yaml":
            self.reply(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.need_token()
            self.create(json.loads(body))
        elif path.startswith("/lfs-store/"):  # the address is the permission, as with the Hub's
            if hashlib.sha256(body).hexdigest() != path.rpartition("/")[2]:
                raise Refusal(400, "other bytes than were announced")
            server.lfs[path.rpartition("/")[2]] = body
            self.reply(200, b"")
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.need_token()
            objects = json.loads(body)["objects"]
            for blob in objects:
                blob["actions"] = {"upload": {"href": f"{server.url}/lfs-store/{blob['oid']}"}}
            self.reply(200, {"transfer": "basic", "objects": objects})
        elif match := FILE.fullmatch(path):
            self.send_file(self.find("datasets" if match[1] else "models", *match.groups()[1:4]), match[5])
        elif match := API.fullmatch(path):
            kind, owner, name, verb, revision, rest = match.groups()
            self.api(self.find(kind, owner, name, revision or "main"), verb or "revision", rest or "", query, body)
        else:
            raise Refusal(404, "EntryNotFound")

    def need_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            raise Refusal(401, "Unauthorized")

    def find(self, kind: str, owner: str, name: str, revision: str) -> Path:
        """Folder of a repository at a branch or a commit."""
        main = self.server.root / kind / owner / name
        if not main.is_dir():
            raise Refusal(404, "RepoNotFound")
        branches = {path.name.partition("@")[2].replace("--", "/"): path for path in main.parent.glob(f"{name}@*")}
        branches["main"] = main
        branches |= {commit(path): path for path in branches.values()}
        if revision not in branches:
            raise Refusal(404, "RevisionNotFound")
        return branches[revision]

    def create(self, request: dict) -> None:
        kind, owner = request.get("type", "model") + "s", request.get("organization", "me")
        if owner != "me":
            raise Refusal(403, f"no right to create repositories of {owner}")
        folder = self.server.root / kind / owner / request["name"]
        status = 409 if folder.exists() else 200
        folder.mkdir(parents=True, exist_ok=True)
        self.reply(status, {"url": self.url_of(folder)})

    def url_of(self, folder: Path) -> str:
        return f"{self.server.url}/{folder.relative_to(self.server.root)}".replace("/models/", "/")

    def send_file(self, folder: Path, path: str) -> None:
        if not (folder / path).is_file():
            raise Refusal(404, "EntryNotFound")
        content = (folder / path).read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit(folder)}
        self.reply(200, content, headers)

    def api(self, folder: Path, verb: str, rest: str, query: dict, body: bytes) -> None:
        if verb == "revision":
            name, files = (
                f"{folder.parent.name}/{folder.name}",
                [str(path.relative_to(folder)) for path in walk(folder)],
            )
            self.reply(200, {"id": name, "sha": commit(folder), "siblings": [{"rfilename": file} for file in files]})
        elif verb == "tree":
            if not (folder / rest).is_dir():
                raise Refusal(404, "EntryNotFound")
            found = (folder / rest).rglob("*") if "true" in query.get("recursive", []) else (folder / rest).iterdir()
            self.reply(200, [describe(path, folder) for path in sorted(found)])
        elif verb == "preupload":
            self.need_token()
            files = json.loads(body)["files"]
            modes = {f["path"]: "regular" if f["path"].endswith(TEXTS) and f["size"] < 1e6 else "lfs" for f in files}
            answers = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            self.reply(200, {"files": answers})
        elif verb == "commit":
            self.need_token()
            for line in body.splitlines():
                self.apply(folder, **json.loads(line))
            self.reply(
                200, {"commitUrl": f"{self.url_of(folder)}/commit/{commit(folder)}", "commitOid": commit(folder)}
            )
        else:
            raise Refusal(404, "EntryNotFound")

    def apply(self, folder: Path, key: str, value: dict) -> None:
        """One operation of a commit."""
        path = folder / value.get("path", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        if key == "file":
            path.write_bytes(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            path.write_bytes(self.server.lfs[value["oid"]])
        elif key == "deletedFile":
            path.unlink()
        elif key == "deletedFolder":
            shutil.rmtree(path)


def walk(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def commit(folder: Path) -> str:
    """The commit of a folder: a hash of its files."""
    states = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in walk(folder)]
    return hashlib.sha1(json.dumps(states).encode()).hexdigest()


def describe(path: Path, folder: Path) -> dict:
    facts = {"path": str(path.relative_to(folder)), "type": "file" if path.is_file() else "directory"}
    content = path.read_bytes() if path.is_file() else b""
    return facts | {"oid": hashlib.sha1(content).hexdigest(), "size": len(content)}


def serve(root: Path, port: int = 0, token: str = "secret") -> ThreadingHTTPServer:
    """A server that is bound to its port, for `serve_forever`."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.root, server.token, server.lfs = Path(root), token, {}
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="secret")
    args = parser.parse_args()
    hub = serve(Path(args.root), args.port, args.token)
    print(hub.server_address[1], flush=True)
    hub.serve_forever()
