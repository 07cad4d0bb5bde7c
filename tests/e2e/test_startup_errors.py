"""Failed starts of an engine: one error with the reason, and an exit code.

Starting a process takes seconds, so most of the engine's own errors are tested with ``Engine``,
which builds it in the same way.
"""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from corun import AdapterError, ConfigError, CorunError, Engine, ModelError, ResourceError
from corun.runtime.demo import demo_adapters_path, demo_model_path
from support.fake_core import save_tokenizer
from support.serving import START_TIMEOUT_S, corun_command

NUM_AT_ONCE = 2
USAGE, FAILED = 2, 1


@dataclass(frozen=True)
class Case:
    """A command line that cannot work, made in a directory of its own."""

    arguments: Callable[[Path], list[str]]
    exit_code: int
    message: str  # a pattern


def missing_module(directory: Path) -> list[str]:
    return ["--lora-modules", f"a={directory / 'none'}"]


def high_rank(directory: Path) -> list[str]:
    return ["--max-lora-rank", "8", "--lora-modules", f"sum={demo_adapters_path() / 'add'}"]


def without_tokenizer(directory: Path) -> list[str]:
    ignored = shutil.ignore_patterns("tokenizer*")
    return [str(shutil.copytree(demo_model_path(), directory / "mute", ignore=ignored))]


def yaml_file(directory: Path) -> list[str]:
    (directory / "serve.yaml").write_text("max-model-length: 100\n")
    return ["--config", str(directory / "serve.yaml")]


CASES = {
    "unknown option": Case(lambda _: ["--max-model-length", "9"], USAGE, "--max-model-len"),
    "wrong value": Case(lambda _: ["--dtype", "int3"], USAGE, "--dtype.*int3.*bfloat16"),
    "unknown YAML key": Case(yaml_file, USAGE, "max-model-length.*max-model-len"),
    "adapter missing": Case(missing_module, USAGE, "--lora-modules a .*no such directory"),
    "no tokenizer": Case(without_tokenizer, FAILED, "cannot load a tokenizer from .*mute"),
    "rank over the limit": Case(high_rank, FAILED, "sum.*rank 64.*8.*--max-lora-rank"),
}
if not torch.cuda.is_available():
    CASES["no CUDA device"] = Case(lambda _: ["--device", "cuda"], USAGE, "--device.*CUDA.*cpu")


def start(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        corun_command("serve", "--port", "0", *arguments),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, "Future[subprocess.CompletedProcess[str]]"]]:
    """Run all command lines concurrently."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield {
            name: pool.submit(start, case.arguments(tmp_path_factory.mktemp("case")))
            for name, case in CASES.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_start_fails(results: dict[str, "Future[subprocess.CompletedProcess[str]]"], name: str) -> None:
    case, done = CASES[name], results[name].result()
    check(done, case.exit_code, case.message)


def check(done: "subprocess.CompletedProcess[str]", exit_code: int, message: str) -> None:
    """Check that the error is the last line and printed once, without traceback or log line."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    before, mark, error = done.stderr.partition("corun: error: ")
    assert mark, done.stderr
    assert re.search(message, error, re.DOTALL), error
    assert "Traceback" not in done.stderr
    assert "ERROR" not in before, before


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start(["--port", str(port)])
    check(done, USAGE, f"port {port} .*--port")


def refused_adapter(directory: Path) -> dict[str, Any]:
    path = shutil.copytree(demo_adapters_path() / "upper", directory / "biased")
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_bias": True}))
    return {"lora_modules": (f"biased={path}",)}


def refused_model(directory: Path) -> dict[str, Any]:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=262, hidden_size=64, n_layer=2, n_head=4)
    torch.manual_seed(0)
    BloomForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)
    return {"model": str(directory)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (lambda d: {"model": str(d / "none")}, ModelError, "no such model directory.*none"),
        (lambda d: {"model": str(d)}, ModelError, "config.json"),
        (refused_model, ModelError, "(?i)bloom.*attention interface"),
        (refused_adapter, AdapterError, "biased.*lora_bias"),
        (lambda _: {"max_model_len": 513}, ConfigError, "--max-model-len.*513.*512"),
        (
            lambda _: {"memory_gib": 1e-4, "max_model_len": 512},
            ResourceError,
            "--max-model-len.*--memory-gib",
        ),
        (lambda _: {"memory_gib": 1e6}, ResourceError, "--memory-gib.*1e.06.*free"),
    ],
)
def test_engine_does_not_start(
    tmp_path: Path, options: Callable[[Path], dict[str, Any]], error: type[CorunError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(**options(tmp_path))
