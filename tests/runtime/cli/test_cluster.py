"""``corun cluster`` and related commands: mistakes give one line before any process is started."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corun.runtime.cli.cluster_asks import status_lines
from corun.runtime.cli.main import main
from corun.runtime.cluster.wire import AdapterEntry, AgentReport, ClusterStatus, EngineCard, EngineStatus
from corun.runtime.server.listening import bind, listen
from support.architectures import save_model
from support.clusters import KEY
from support.recorded_vllm import VllmOptions, vllm_card, vllm_in_a_thread

HERE = ("cluster", "--engines", "1", "--unpinned")
ELSEWHERE = "http://127.0.0.1:1"
ONE = "http://h:1"
VLLM = f"{ONE},kind=vllm"
pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is refused too late out of the user's directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cluster",), "no engine: give --engines N, or --engine URL"),
        (("cluster", "--engines", "0"), "--engines is 0, must be at least 1"),
        (("cluster", "--engines", "two"), "--engines is 'two', must be a whole number"),
        (("cluster", "--engines", "2000"), "must be at most 1024"),
        ((*HERE, "--gateways", "0"), "--gateways is 0, must be at least 1"),
        ((*HERE, "--router", "predictd"), "did you mean 'predicted'?"),
        ((*HERE, "--router", "dlora"), "--router dlora is for corun simulate alone: it moves"),
        ((*HERE, "--placement", "stick"), "did you mean 'sticky'?"),
        ((*HERE, "--placement", "loraserve"), "--placement loraserve needs --operating-points"),
        ((*HERE, "--placement-interval-s", "5"), "must be at least 15"),
        ((*HERE, "--min-copies", "a=2"), "--min-copies is a=2, but there are 1 engines"),
        ((*HERE, "--min-copies", "a"), "must be NAME=K, with K from 1 on"),
        ((*HERE, "--min-copies", "a=1", "--min-copies", "a=1"), "names 'a' twice"),
        ((*HERE, "--adapter-cache-gib", "0"), "must be more than 0"),
        ((*HERE, "--lora-state-file", "x"), "unknown option --lora-state-file"),
        ((*HERE, "--engine-cores", "0"), "unknown option --engine-cores"),
        ((*HERE, "--cluster-host", "0.0.0.0"), "must be an address that other machines can"),
        ((*HERE, "--cluster-host", "192.0.2.1"), "cannot listen on 192.0.2.1:0 (--cluster-host"),
        ((*HERE, "--cluster-key-file", "/nowhere"), "--cluster-key-file /nowhere cannot be read"),
        ((*HERE, "--state-dir", "/proc/corun"), "--state-dir /proc/corun: "),
        ((*HERE, "--pin", "nobody"), "--pin names 'nobody'"),
        (("cluster", "m", *HERE[1:], "--pin", "x", "--lora-dir", "/nowhere"), "no such directory"),
        (("cluster", "m", "--engine", ELSEWHERE), "MODEL is m, but no engine is started"),
        (("cluster", "--engine", "/some/path"), "--engine is '/some/path', expected something"),
        (("cluster", "--engine", "https://host"), "expected something like http://"),
        (("cluster", "--engine", "http://h:99999"), "expected something like http://"),
        (
            ("cluster", "--engine", "http://h:1", "--engine", "http://h:1/v1/"),
            "--engine names http://h:1 twice",
        ),
        (("cluster", "--engine", ELSEWHERE), f"--engine {ELSEWHERE} cannot join the cluster"),
        (("cluster", "--engine", f"{ONE},kind=tgi"), "kind is 'tgi', must be one of corun, vllm"),
        (("cluster", "--engine", VLLM), "kind=vllm needs model=MODEL, the directory or hub id"),
        (("cluster", "--engine", f"{ONE},model=m"), "model and limits are for kind=vllm; a corun"),
        (("cluster", "--engine", f"{ONE},speed=2"), "must be URL or URL,kind=KIND,model=MODEL"),
        (("cluster", "--engine", f"{VLLM},profile=x"), "profile=FILE is not used any more: costs"),
        (("cluster", "--engine", f"{VLLM},model=m,max_num_seqs=0"), "max_num_seqs is '0', must"),
        (("cluster", "--engine", f"{VLLM},model=/nowhere"), "h:1: no such model"),
        (("cluster", "add", "--engine", f"{VLLM},model=/nowhere"), "http://h:1: no such model directory"),
        (("cluster", "add", "--state-dir", "x"), "nothing to add: give --engines N, or --engine"),
        (("cluster", "drain"), "the following arguments are required: ENGINE"),
        (("cluster", "status", "--engines", "1"), "unknown option --engines"),
        (("gateway",), "no cluster: give --controller URL"),
        (("gateway", "--controller", "there"), "--controller is 'there', expected something"),
        (("gateway", "--controller", ELSEWHERE, "--router", "x"), "--router is 'x', must be one"),
        (("gateway", "--controller", ELSEWHERE, "--router", "dlora"), "simulate alone: it moves"),
        (("gateway", "--controller", ELSEWHERE), "cluster.key cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("corun: error: ")]
    assert len(lines) == 1 and words in lines[0], output.err
    assert output.out == ""


OVER_RAY = ("cluster", "--engines", "1", "--ray")


@pytest.mark.parametrize(
    ("arguments", "version", "words"),
    [
        ((*OVER_RAY, "auto"), "2.55.0", "--ray is 'auto', expected HOST:PORT of Ray's head"),
        ((*OVER_RAY, "ray://h:10001"), "2.55.0", "--ray is 'ray://h:10001', expected HOST:PORT"),
        ((*OVER_RAY, "h:1", "--cluster-name", "a/b"), "2.55.0", "--cluster-name is 'a/b', must"),
        (("cluster", "--ray", "h:1", "--engine", ELSEWHERE), "2.55.0", "there are no engines to start"),
        ((*OVER_RAY, "127.0.0.1:1"), None, "--ray needs Ray: pip install 'corun[ray]'"),
        ((*OVER_RAY, "127.0.0.1:1"), "2.54.1", "--ray needs Ray 2.55 or newer, but 2.54.1 is"),
        ((*OVER_RAY, "127.0.0.1:1"), "3.0.0rc1", "--ray 127.0.0.1:1 does not answer within 5 s"),
    ],
)
def test_ray_that_is_not_there_is_one_line(
    arguments: tuple[str, ...],
    version: str | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("corun: error: ") and words in line


def test_too_few_cores_are_refused_with_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert main(("cluster", "--engines", "2")) == 2
    finally:
        os.sched_setaffinity(0, before)
    assert "--engines 2 needs 3 physical cores" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for shares_port in (False, True):  # a port that could be shared is taken all the same
        with bind("127.0.0.1", 0, shares_port=shares_port) as sock:
            listen(sock)
            port = sock.getsockname()[1]
            assert main((*HERE, "--port", str(port))) == 2
            assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
            assert main((*HERE, "--cluster-port", str(port))) == 2
            assert "choose another with --cluster-port" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "one\ntwo\n", "\x07"])
def test_a_file_that_holds_no_key_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    assert main((*HERE, "--cluster-key-file", str(path))) == 2
    assert f"--cluster-key-file {path} must hold one key" in capsys.readouterr().err


def test_options_of_files_and_variables_are_refused_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("engines: 1\nlora-state-file: x\n")
    assert main(("cluster", "--config", str(path))) == 2
    words = "--lora-state-file is not for corun cluster: its registry keeps adapters"
    assert words in capsys.readouterr().err
    monkeypatch.setenv("CORUN_ENGINE_CORES", "0")
    assert main(HERE) == 2
    assert "--engine-cores is not for corun cluster: it divides" in capsys.readouterr().err


def test_nothing_that_runs_is_said_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(("cluster", "status", "--state-dir", str(tmp_path))) == 1
    assert f"no cluster runs with --state-dir {tmp_path}; give" in capsys.readouterr().err


def test_a_library_that_is_missing_is_named() -> None:
    script = (
        "import sys; sys.modules['aiohttp'] = None; from corun.runtime.cli.main import main; "
        "sys.exit(main(['cluster', '--engines', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    words = "corun: error: corun cluster needs aiohttp: pip install 'corun[cluster]'\n"
    assert done.stderr == words


def test_status_says_what_there_is() -> None:
    engines = (
        EngineStatus(engine_id="m-0", url="http://h:1", state="ready", pid=7, cpu_list="0-3", num_restarts=1),
        EngineStatus(engine_id="m-1", url=None, state="exited", pid=0, cpu_list="", reason="exit status 1"),
    )
    status = ClusterStatus(
        engines=(
            EngineCard(engine_id="m-0", url="http://h:1", agent_id="m"),
            EngineCard(engine_id="http://o:1", url="http://o:1", is_draining=True),
            vllm_card("http://v:1"),
        ),
        agents=(
            AgentReport(
                agent_id="m",
                url="http://h:9",
                engines=engines,
                copies={"d": 1.0},
                store_bytes=2 << 30,
                used_bytes=1 << 30,
                core_division="engine 0: CPU 0-3\nothers",
            ),
        ),
        adapters=(
            AdapterEntry(name="a", revision=3, digest="d", rank=8, num_bytes=1, source="/a", pinned=True),
            AdapterEntry(
                name="b",
                revision=4,
                digest="e",
                rank=8,
                num_bytes=1,
                source="/b",
                state="failed",
                reason="no",
            ),
        ),
        ejected={"g": {"m-0": "silent"}},
        placement="sticky",
        num_gateways=2,
    )
    assert list(status_lines("http://c:1", status)) == [
        "controller http://c:1, 2 gateways, placement sticky",
        "engine m-0  ready  http://h:1, CPU 0-3, 1 restart, not sent to: silent",
        "engine http://o:1  draining  http://o:1",
        "engine http://v:1  ready  http://v:1, vllm",
        "engine m-1  exited: exit status 1",
        "agent m  http://h:9, 1 adapter in 1 of 2 GiB",
        "  engine 0: CPU 0-3",
        "  others",
        "adapter a  ready, rank 8, revision 3, 1 copy, pinned",
        "adapter b  failed: no, rank 8, revision 4, 0 copies",
    ]


def test_a_server_that_cannot_be_an_engine_ends_the_start(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_model("llama3-rope", tmp_path_factory.mktemp("model"))
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    with vllm_in_a_thread(VllmOptions(key=KEY, has_lora=False)) as url:
        given = f"{url},kind=vllm,model={model}"
        place = ("--state-dir", str(tmp_path / "state"), "--cluster-key-file", str(tmp_path / "key"))
        assert main(("cluster", "--port", "0", "--engine", given, *place)) == 2
    errors = [one for one in capfd.readouterr().err.splitlines() if "corun: error: " in one]
    assert len(errors) == 1 and f"--engine {url} cannot join the cluster" in errors[0]
    assert "it serves no LoRA adapters: start it with --enable-lora" in errors[0]
