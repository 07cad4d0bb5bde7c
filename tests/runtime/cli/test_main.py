"""The command line: parsing, refusals, and the time of ``--help``."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from corun.runtime import file_calls
from corun.runtime.cli.main import main
from corun.runtime.cli.parser import parse_arguments
from corun.runtime.cli.serve import check_paths, serve_configs
from corun.runtime.config.demo import with_demo
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.demo import demo_adapters_path, demo_model_path
from corun.runtime.errors import ConfigError
from corun.runtime.exit_codes import EXIT_UNREAD
from corun.runtime.scheduler.registry import SCHEDULER_POLICIES

pytestmark = pytest.mark.usefixtures("own_logging")


def _configs(*argv: str) -> tuple[EngineConfig, ServeConfig]:
    return serve_configs(parse_arguments(["serve", *argv]))


def _fails(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> str:
    """Run an invalid command line; return its one line of error."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("corun: error: ")
    return err


def test_defaults_are_those_of_the_fields() -> None:
    engine, serve = _configs("some/model")
    assert engine == EngineConfig(model="some/model")
    assert serve == ServeConfig()


def test_flags_set_fields(tmp_path: Path) -> None:
    argv = ["m", "--dtype", "float32", "--max-model-len=64", "--memory-gib", "1.5", "--port", "0"]
    argv += ["--trust-remote-code", "--no-skip-parity-probe", "--seed", "-1"]
    argv += ["--lora-modules", f"a={tmp_path}", f"b={tmp_path}", "--lora-modules", f"c={tmp_path}"]
    engine, serve = _configs(*argv)
    assert engine == EngineConfig(
        model="m",
        dtype="float32",
        max_model_len=64,
        memory_gib=1.5,
        trust_remote_code=True,
        seed=-1,
        lora_modules=tuple(f"{name}={tmp_path}" for name in "abc"),
    )
    assert serve.port == 0


@pytest.mark.parametrize("flag", ["--api-key", "--admin-key"])
def test_a_flag_takes_several_keys(flag: str) -> None:
    engine, serve = _configs("m", flag, "one", "two", "--port", "0", flag, "three")
    assert engine.model == "m"
    assert getattr(serve, flag[2:].replace("-", "_")) == ("one", "two", "three")
    assert _configs(flag, "one", "two")[0].model == str(demo_model_path())


@pytest.mark.parametrize(
    "argv",
    [
        ["secret-b", "--api-key", "secret-a", "secret-b"],
        ["secret-b", "--admin-key", "secret-b"],
        ["secret-b", "--api-key-file", "{file}"],
        ["secret-b", "--admin-key-file", "{file}"],
        ["--api-key", "secret-a", "secret-b/model"],
        ["--api-key", "secret-a", "--admin-key", "secret-a", "{directory}"],
    ],
)
@pytest.mark.parametrize("command", ["serve", "cluster"])
def test_a_key_is_not_taken_for_a_model(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    argv: list[str],
) -> None:
    (tmp_path / "secret-b").write_text("secret-a\nsecret-b\n")
    places = {"file": "secret-b", "directory": str(tmp_path)}
    monkeypatch.chdir(tmp_path)
    error = _fails(capsys, [command, *(one.format(**places) for one in argv)])
    assert "MODEL" in error and "-key" in error
    assert "secret" not in error and str(tmp_path) not in error


def test_a_model_of_the_environment_leaves_all_values_to_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORUN_MODEL", "some/model")
    engine, serve = _configs("--api-key", "one", "of/two")
    assert (engine.model, serve.api_key) == ("some/model", ("one", "of/two"))


def test_a_file_says_how_requests_are_scheduled(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "scheduling-policy: fcfs\noutput-predictor: limit\nslo-ttft-s: 2\n"
        "prefetch-requests: 0\ngrowth-headroom: 0.05\n"
    )
    policy = "chameleon:queues=2,refresh=30"
    engine, _ = _configs("m", "--config", str(file), "--scheduling-policy", policy)
    assert engine == EngineConfig(
        model="m",
        scheduling_policy=policy,
        output_predictor="limit",
        slo_ttft_s=2.0,
        prefetch_requests=0,
        growth_headroom=0.05,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max-model-length", "5"], "did you mean --max-model-len"),
        (["serve", "--max-model", "5"], "unknown option --max-model "),
        (["serve", "a", "b"], "unknown argument b"),
        (["serve", "--port", "http"], "--port is 'http', must be a whole number"),
        (["serve", "--port"], "--port: expected one argument"),
        (["serve", "--memory-gib", "nan"], "must be a finite number"),
        (["serve", "--device", "gpu"], "must be one of auto, cuda, cuda:N, cpu"),
        (
            ["serve", "--scheduling-policy", "fifo"],
            f"is 'fifo', must be one of: {', '.join(SCHEDULER_POLICIES)}",
        ),
        (
            ["serve", "--output-predictor", "bert"],
            "--output-predictor is 'bert', must be one of history, limit",
        ),
        (
            ["serve", "--queues", "fixed:4"],
            "option --queues, which is gone: give --scheduling-policy chameleon:queues=K",
        ),
        (["plan", "--refresh-s=60"], "give --scheduling-policy chameleon:refresh=SECONDS"),
        (["serve", "--memory-policy-weights", "1,1,1"], "give --memory-policy chameleon:frequency"),
        (["serve", "--prefetch-expected"], "which is gone: give --pin NAME"),
        (["serve", "--host-kv-bytes", "1"], "which is gone: give --host-bytes"),
        (
            ["serve", "--scheduling-policy", "chameleon:queues=5"],
            "--scheduling-policy chameleon has queues=5, must be a whole number from 1 to 4",
        ),
        (["serve", "--scheduling-policy", "chameleon:refresh=0"], "refresh=0, must be above 0"),
        (["serve", "--scheduling-policy", "corun:queues=2"], "corun has no option 'queues'"),
        (["serve", "--scheduling-policy", "chameleon:queues"], "expected chameleon:KEY=NUMBER"),
        (["serve", "--slo-ttft-s", "0"], "--slo-ttft-s is 0.0, must be more than 0"),
        (["serve", "--prefetch-requests", "-1"], "--prefetch-requests is -1, must be at least 0"),
        (["serve", "--growth-headroom", "0.6"], "--growth-headroom is 0.6, must be at most 0.5"),
        (["serve", "--lora-dir", "/no/such"], "--lora-dir /no/such: no such directory"),
        (["serve", "--allowed-lora-dirs", "/no/such"], "--allowed-lora-dirs /no/such: no such directory"),
        (["serve", "--lora-modules", "a=/no/such"], "--lora-modules a /no/such: no such directory"),
        (["serve", "--lora-modules", "a"], "must be NAME=PATH"),
        (["serve", "--chat-template", "/no/such"], "--chat-template /no/such: no such file"),
        (["serve", "--config", "/no/such"], "--config /no/such: No such file"),
        (["check"], "ADAPTER"),
        (["check", "x", "--rank", "1"], "unknown option --rank"),
        (["sevre"], "unknown command 'sevre' (did you mean serve?) (see corun --help)"),
        (["serv", "some/model"], "unknown command 'serv' (did you mean serve?)"),
        (["some/model"], "unknown command 'some/model'; to serve this model: corun serve some/mod"),
        (["cluster", "statsu"], "unknown command 'cluster statsu' (did you mean corun cluster sta"),
        (["--port", "1", "serve"], "unknown option --port before the command"),
        (["serve", "-m", "x"], "-m is not needed: the model is the first argument"),
        (["serve", "-hf", "x"], "-hf is not needed: the model is the first argument"),
        (["serve", "x", "--gpu-memory-utilization=0.9"], "is called --memory-fraction here: a"),
        (["cluster", "x", "--tp", "2"], "--tp is not there: an engine has one device"),
        (["completion", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in _fails(capsys, argv)


def test_a_server_that_cannot_start_leaves_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    others = set(psutil.Process().children())  # earlier tests may have left some
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in _fails(capsys, ["serve", "x", "--port", str(taken.getsockname()[1])])
    assert set(psutil.Process().children()) <= others


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--log-level", "debug", "--port", "-5"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "corun: error: --port is -5, must be at least 0" in err


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match="not a directory"):
        _configs("--lora-dir", str(path))


def test_without_a_model_the_demo_is_served(tmp_path: Path) -> None:
    config = with_demo(EngineConfig())
    assert config.model == str(demo_model_path())
    assert config.lora_dir == str(demo_adapters_path())
    own = with_demo(EngineConfig(lora_modules=(f"a={tmp_path}",)))
    assert (own.model, own.lora_dir) == (str(demo_model_path()), None)
    assert with_demo(EngineConfig(model="m")) == EngineConfig(model="m")


def test_help_loads_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from corun.runtime.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numba', 'starlette'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("buffering", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", ["completion fish", "env"])
def test_a_command_whose_reader_ends_leaves_quietly(command: str, buffering: str) -> None:
    script = Path(sys.executable).with_name("corun")
    environment = os.environ | {"PYTHONUNBUFFERED": buffering}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        done = subprocess.run(
            [script, *command.split()], stdout=output, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.stderr == ""
    assert done.returncode == (EXIT_UNREAD if buffering or command != "env" else 0)


def test_a_broken_pipe_of_its_own_is_told() -> None:
    script = (
        "from corun.runtime.cli import main\n"
        "def broken():\n    raise BrokenPipeError('its own')\n"
        "main.main = broken\n"
        "main.console()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "its own" in done.stderr


def test_module_and_console_script_agree() -> None:
    script = Path(sys.executable).with_name("corun")
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("corun ")


def test_env_shows_versions_devices_and_limits() -> None:
    script = Path(sys.executable).with_name("corun")
    done = subprocess.run([script, "env"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(":", 1) for line in done.stdout.splitlines())
    for name in ("corun", "python", "torch", "transformers", "triton", "numba"):
        assert facts[name].strip()
    for name in ("cpu", "cpu features", "cpus", "memory", "memory limit", "/dev/shm"):
        assert facts[name].strip()
    assert "numba threading" in facts
    assert any(name.startswith("cuda device") for name in facts)
    assert facts["torch built for cuda"].strip() == (torch.version.cuda or "no")


def test_directories_that_the_options_name_exist_or_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path, reason in (("x", "no such directory"), ("file", "not a directory")):
        directory = str(tmp_path / path)
        for engine, serve in (
            (EngineConfig(lora_dir=directory), ServeConfig()),
            (EngineConfig(lora_modules=(f"a={directory}",)), ServeConfig()),
            (EngineConfig(), ServeConfig(allowed_lora_dirs=(directory,))),
        ):
            with pytest.raises(ConfigError, match=f"{directory}: {reason}"):
                check_paths(engine, serve)
    monkeypatch.setattr(file_calls, "is_directory", lambda path: None)
    check_paths(EngineConfig(lora_dir="/mnt/dead"), ServeConfig(allowed_lora_dirs=("/mnt/dead",)))
