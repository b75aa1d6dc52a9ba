"""A Hugging Face hub on 127.0.0.1 that serves one repository from memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def fake_hub(repo: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yields the endpoint, and a list that grows by every file that is downloaded."""
    downloads: list[str] = []
    listing = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            resolve = f"/{repo}/resolve/{COMMIT}/"
            if path == f"/api/models/{repo}/revision/main":
                self._send(json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode(), {}, with_body)
            elif path in (f"/api/models/{repo}/tree/main", f"/api/models/{repo}/tree/{COMMIT}"):
                self._send(json.dumps(listing).encode(), {}, with_body)
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                name = path.removeprefix(resolve)
                if with_body:
                    downloads.append(name)
                etag = hashlib.sha1(files[name]).hexdigest()
                self._send(files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloads
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
