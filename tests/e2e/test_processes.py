"""What the processes of a server hold in memory."""

from pathlib import Path

import psutil
from corun.runtime.demo import chat_prompt
from support.serving import Served


def libraries_of(process: psutil.Process) -> set[str]:
    """Names of the shared libraries that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name.partition(".so")[0] for line in lines if ".so" in line}


def test_each_holds_what_it_uses(server: Served) -> None:
    body = {"prompt": chat_prompt("hello"), "model": "upper"}
    assert server.post("/v1/completions", body).status_code == 200
    front, engine = psutil.Process(server.process.pid), server.engine
    assert "libtorch_cpu" in libraries_of(engine)
    assert "libtorch_cpu" not in libraries_of(front)
    # The compilers of torch and Triton: nothing is compiled by them on a CPU.
    assert not [name for name in libraries_of(engine) if "triton" in name]
