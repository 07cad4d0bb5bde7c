"""A model hub on this machine: the part of its HTTP API that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_COMMIT = "a" * 40


@contextmanager
def fake_hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """Serve directories under the names of repositories, of one revision, ``main``; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            data, headers = b"{}", {"X-Error-Code": "RepoNotFound"}
            found = _content(repositories, self.path.partition("?")[0])
            if found is not None:
                data = found
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": _COMMIT}
            self.send_response(404 if found is None else 200)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _content(repositories: Mapping[str, Path], path: str) -> bytes | None:
    """Of a URL; None = there is nothing."""
    for name, folder in repositories.items():
        files = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
        if path == f"/api/models/{name}/revision/main":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            return json.dumps({"id": name, "sha": _COMMIT, "siblings": siblings}).encode()
        start = f"/{name}/resolve/{_COMMIT}/"
        if path.startswith(start):
            return files.get(path.removeprefix(start))
    return None
