"""What the processes of a server hold in memory."""

import subprocess
import sys
from pathlib import Path

import httpx
import psutil
from corun.runtime.demo import chat_prompt
from support.serving import ANSWER_TIMEOUT_S

_SERVER = """
import sys
from corun.runtime.cli.main import main
status = main(["serve", "--port", "0", "--cpu-threads", "1"])
print(status, sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def libraries_of(process: psutil.Process) -> set[str]:
    """Names of the shared libraries that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name.partition(".so")[0] for line in lines if ".so" in line}


def test_the_server_process_imports_neither_torch_nor_transformers() -> None:
    """After encoding, rendering and decoding; the engine process holds torch."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        log = []
        for line in server.stderr:
            log.append(line)
            if " at http://" in line:
                break
        else:
            raise AssertionError("".join(log))
        url = log[-1].split()[-1]
        messages = [{"role": "user", "content": "hello"}]
        for path, body in (
            ("/chat/completions", {"messages": messages, "max_tokens": 40, "logprobs": True}),
            ("/completions", {"prompt": "a" * 400, "max_tokens": 4, "echo": True}),
            ("/completions", {"prompt": chat_prompt("hello"), "model": "upper"}),
        ):
            answer = httpx.post(url + path, json=body, timeout=ANSWER_TIMEOUT_S)
            assert answer.status_code == 200, answer.text
        front = psutil.Process(server.pid)
        (engine,) = (c for c in front.children() if "corun.runtime.engine.process" in c.cmdline())
        assert "libtorch_cpu" in libraries_of(engine)
        assert "libtorch_cpu" not in libraries_of(front)
        server.terminate()
        assert server.communicate(timeout=30)[0] == "0 []\n"
