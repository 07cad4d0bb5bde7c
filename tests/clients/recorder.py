"""Stands between client and server, and writes down one body of each shape that is answered."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from support.serving import ANSWER_TIMEOUT_S

RECORDED = Path(__file__).parent / "recorded"
_PASSED_ON = {"content-type", "authorization", "accept", "x-request-id"}


def shape_of(value: Any) -> Any:
    """What is in a body but for its values: the fields and their types."""
    if isinstance(value, dict):
        return {name: shape_of(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        shapes = [shape_of(item) for item in value]
        return [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    return type(value).__name__


def shape_of_request(request: dict[str, Any]) -> Any:
    """The shape of a request; whether it streams makes two of them."""
    body = request["body"] or {}
    return request["method"], request["path"], bool(body.get("stream")), shape_of(body)


class Recorder:
    """An HTTP server in threads. Leaving it closes it."""

    def __init__(self, upstream: str, client: str) -> None:
        self._path = RECORDED / f"{client}.json"
        self._requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._http = httpx.Client(base_url=upstream, timeout=ANSWER_TIMEOUT_S)
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                recorder.pass_on(self)

            def do_POST(self) -> None:
                recorder.pass_on(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._http.close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request with the server's answer."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", "0")))
        headers = {k: v.strip() for k, v in handler.headers.items() if k.lower() in _PASSED_ON}
        with self._http.stream(handler.command, handler.path, content=body, headers=headers) as answer:
            if answer.status_code == 200:
                self._note(handler.command, handler.path, body)
            handler.send_response(answer.status_code)
            handler.send_header("Content-Type", answer.headers["content-type"])
            handler.send_header("Connection", "close")
            handler.end_headers()
            for piece in answer.iter_bytes():
                handler.wfile.write(piece)

    def _note(self, method: str, path: str, body: bytes) -> None:
        request = {"method": method, "path": path, "body": json.loads(body) if body else None}
        with self._lock:
            if shape_of_request(request) not in map(shape_of_request, self._requests):
                self._requests.append(request)

    def check(self, *, write: bool) -> None:
        """Compare with what is recorded, or record."""
        if write and self._requests:
            RECORDED.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self._requests, indent=1, sort_keys=True) + "\n")
            return
        known = [shape_of_request(request) for request in json.loads(self._path.read_text())]
        new = [one for one in self._requests if shape_of_request(one) not in known]
        assert not new, f"not in {self._path} (make test-clients ARGS=--record): {new}"
