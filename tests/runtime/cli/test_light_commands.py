"""Commands that compute nothing import neither torch nor transformers, so they answer at once."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from corun.runtime.cli.main import main
from support.architectures import ARCHITECTURES
from support.peft_adapters import edit_tensors, save_adapter

# Runs a command, and says on the last line of stderr which heavy libraries it has imported.
SCRIPT = """
import sys
from corun.runtime.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as done:
    code = done.code
heavy = ("torch", "transformers", "numba")
print("imported", *(name for name in heavy if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""
COMMANDS = (
    "serve",
    "profile",
    "simulate",
    "plan",
    "check",
    "models",
    "adapters",
    "cluster",
    "cluster status",
    "cluster add",
    "cluster remove",
    "cluster drain",
    "gateway",
    "env",
    "completion",
)
WORKLOAD = """
rps: 2
requests: 30
lengths: {source: fixed, prompt_tokens: 200, output_tokens: 20}
adapters: {number: 10, ranks: [8, 64]}
"""
SMALL = ["--profile", "a40-llama7b", "--seeds", "1", "--jobs", "1"]
ADAPTERS = {"data": [], "has_more": False, "num_adapters": 0, "num_fitting": 0, "age_s": 0}
STATUS = {"engines": [], "agents": [], "adapters": [], "num_gateways": 1, "placement": "none", "ejected": {}}


def imported(command: list[str]) -> set[str]:
    """Heavy libraries that the command has imported."""
    return said_and_imported(command)[1]


def said_and_imported(command: list[str], code: int = 0) -> tuple[str, set[str]]:
    """What the command has printed, and heavy libraries that it has imported."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *command], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    word, *names = done.stderr.splitlines()[-1].split()
    assert word == "imported"
    return done.stdout, set(names)


class Answers(BaseHTTPRequestHandler):
    """Stands for a server or controller that has nothing."""

    def do_GET(self) -> None:
        body = json.dumps(ADAPTERS if "adapters" in self.path else STATUS).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the log quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_imports_no_numbers() -> None:
    """While it does, the engine imports torch, on a machine that may have one core."""
    heavy = ("torch", "transformers", "numba", "numpy", "psutil")
    code = (
        "import sys, corun.runtime.server.run, corun.runtime.server.supervise\n"
        f"print(*(name for name in {heavy!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_help_of_every_command_is_light() -> None:
    script = SCRIPT.replace("main(sys.argv[1:])", "[help_of(name) for name in sys.argv[1:]][0]")
    help_of = (
        "def help_of(name):\n"
        "    try:\n        main([*name.split(), '--help'])\n"
        "    except SystemExit as done:\n        return done.code\n"
    )
    done = subprocess.run([sys.executable, "-c", help_of + script, *COMMANDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: corun") == len(COMMANDS)
    assert done.stderr.splitlines()[-1] == "imported"


def test_adapters_are_listed_without_heavy_libraries(url: str) -> None:
    assert imported(["adapters", "--url", url]) == set()


def test_a_cluster_is_asked_without_heavy_libraries(url: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    options = ["--controller", url, "--cluster-key-file", str(key)]
    assert imported(["cluster", "status", *options]) == set()


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_simulations_run_without_heavy_libraries(command: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(WORKLOAD)
    arguments = [command, "--workload", str(path), *SMALL]
    if command == "plan":
        arguments += ["--slo-ttft-s", "0.5", "--rps", "50", "--requests", "60", "--quick"]
    assert imported(arguments) == set()


def test_env_asks_neither_torch_nor_transformers() -> None:
    """numba measures which arithmetic is faster here, so it is imported."""
    assert imported(["env"]) == {"numba"}


@pytest.mark.usefixtures("own_logging")
def test_a_second_check_imports_nothing_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = tmp_path / "model"
    ARCHITECTURES["llama3-rope"].config().save_pretrained(model)
    save_adapter(tmp_path / "good")
    save_adapter(tmp_path / "bad")
    edit_tensors(tmp_path / "bad", layers__0__self_attn__q_proj__lora_B=lambda one: one / 0)
    good = ["check", str(tmp_path / "good"), "--model", str(model)]
    bad = ["check", str(tmp_path / "bad"), "--model", str(model)]
    assert main(good) == 0
    first = capsys.readouterr().out
    assert said_and_imported(good) == (first, set())
    said, heavy = said_and_imported(bad, code=1)
    assert "not finite" in said and heavy == set()
