"""A program that takes ``serve --config FILE --host H --port P`` and answers as an engine does.

It computes nothing and loads only the standard library, so it starts at once. GET /received returns
the options, keys, CPUs and adapters that it was given. Adapters from a directory with a file
``refuse`` are refused.
"""

import json
import os
import signal
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Received:
    """State of this engine, from what it has received."""

    incarnation = uuid.uuid4().hex
    adapters: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - of the one engine of this process
    used: set[str] = set()  # noqa: RUF012


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/engine_state":
            self._stream()
        elif self.path == "/received":
            self._answer(
                {
                    "options": json.loads(Path(sys.argv[3]).read_text()),
                    "api_key": os.environ.get("CORUN_API_KEY"),
                    "admin_key": os.environ.get("CORUN_ADMIN_KEY"),
                    "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
                    "cpus": sorted(os.sched_getaffinity(0)),
                    "adapters": Received.adapters,
                }
            )
        elif self.path.startswith("/v1/lora_adapters/"):
            self._answer_use(self.path.removeprefix("/v1/lora_adapters/"))
        elif self.path == "/v1/profile":
            self._answer(json.loads(os.environ["BARE_ENGINE_PROFILE"]))
        else:
            self._answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["lora_name"]
        if self.path == "/use":
            (Received.used.add if body["used"] else Received.used.discard)(name)
        elif self.path == "/v1/unload_lora_adapter":
            if Received.adapters.pop(name, None) is None:
                self._refuse(404, f"no adapter {name}")
                return
        elif "lora_path" in body:
            if not (Path(body["lora_path"]) / "adapter_config.json").is_file():
                self._refuse(400, f"{body['lora_path']} holds no adapter")
                return
            if b"refuse" in (Path(body["lora_path"]) / "adapter_config.json").read_bytes():
                self._refuse(400, f"{body['lora_path']} does not fit")
                return
            Received.adapters[name] = body
        else:
            Received.adapters[name]["pinned"] = body["pinned"]
        self._answer({"status": "done"})

    def _answer_use(self, name: str) -> None:
        """Requests of an unloaded name continue, as those of its former version."""
        use = {"num_references": int(name in Received.used), "num_waiting": 0}
        if name in Received.adapters:
            self._answer(use | {"state": "ready", "draining": []})
        elif name in Received.used:
            self._answer(use | {"state": "draining", "draining": []})
        else:
            self._refuse(404, f"no adapter {name}")

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for beat in range(10_000):
            state = {"incarnation": Received.incarnation, "beat": beat}
            try:
                self.wfile.write(b"data: " + json.dumps(state).encode() + b"\n\n")
            except OSError:
                return
            time.sleep(0.2)

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "x", "param": None, "code": "refused"}
        self._answer({"error": error}, status)


class Server(ThreadingHTTPServer):
    """Ends without waiting for streams."""

    daemon_threads = True
    block_on_close = False


def main() -> None:
    host, port = sys.argv[5], int(sys.argv[7])
    if json.loads(Path(sys.argv[3]).read_text()).get("seed") == 13:
        sys.exit(2)  # an option that it refuses
    server = Server((host, port), Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
