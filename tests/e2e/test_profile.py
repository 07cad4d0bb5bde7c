"""``corun profile`` as a user runs it: the file, the picture, the lines to paste, the warnings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from corun.profiles.profile import Profile, load_profile
from corun.runtime.cli.main import main
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.config.yaml_file import read_yaml_options
from support.devices import DEVICES
from support.profiles import any_fit

pytestmark = pytest.mark.usefixtures("own_logging")

# With times of a busy machine a profile is kept with any fit.
_COMMAND = """
import sys
from corun.runtime.cli.main import main
from support.profiles import any_fit
with any_fit():
    sys.exit(main())
"""
_TIMEOUT_S = 100.0
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def _profile(state: Path, *options: str, where: str = "cpu") -> "subprocess.CompletedProcess[str]":
    """Run it on the demo, as short as possible."""
    command = [sys.executable, "-c", _COMMAND, "profile", "--device", where]
    return subprocess.run(
        [*command, "--budget-s", "1", *options],
        env=os.environ | {"XDG_STATE_HOME": str(state), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def _yaml_options(done: "subprocess.CompletedProcess[str]", tmp_path: Path) -> dict[str, object]:
    """Return the printed lines as ``corun serve --config`` reads them."""
    _, mark, lines = done.stdout.partition("# for corun serve --config FILE.yaml\n")
    assert mark
    path = tmp_path / "serve.yaml"
    path.write_text(lines)
    return read_yaml_options(str(path), option_specs(EngineConfig) + option_specs(ServeConfig))


def _saved(options: dict[str, object]) -> Profile:
    path = options["profile"]
    assert isinstance(path, str)
    with any_fit():
        return load_profile(Path(path))


@contextmanager
def _somebody_who_computes() -> Iterator[None]:
    """A process that is not the profiler's own."""
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


@pytest.mark.parametrize("where", DEVICES)
def test_with_a_link_everything_is_measured(where: str, tmp_path: Path) -> None:
    engine_cpu, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("a worker needs a CPU beside the engine's")
    given = ["--engine-cores", str(engine_cpu), "--cpu-cores", str(others[0])]
    given += ["--quantization", "int8"] if where == "cpu" else []
    done = _profile(tmp_path, "--link-gib-per-s", "1", *given, where=where)
    assert done.returncode == 0, done.stderr
    options = _yaml_options(done, tmp_path)
    profile = _saved(options)
    assert options == {
        "device": where,
        "link_gib_per_s": 1.0,
        "cpu_cores": str(others[0]),
        "engine_cores": str(engine_cpu),
        "profile": options["profile"],
    } | ({"quantization": "int8"} if where == "cpu" else {})
    assert len(list(tmp_path.rglob("*.weights"))) == (where == "cpu")  # for the next start
    # Where serve looks with these options, with the picture beside it.
    (picture,) = (tmp_path / "corun" / "profiles").glob("*.png")
    assert picture.read_bytes().startswith(_PNG_MAGIC)
    assert picture.with_suffix(".json") == Path(str(options["profile"]))

    assert [group.name for group in profile.model.groups] == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert profile.coexecution_off == ""
    assert profile.model.num_workers == 1
    assert profile.model.invocation_s > 0
    assert profile.model.assisted_pass_s >= 0
    assert 0 <= profile.model.contention <= 1
    # Paced copies cannot be faster; a fit to their noisy times can be.
    assert max(point.bytes_per_s for point in profile.link_points) < 1.05 * 2**30
    assert profile.model.link.bytes_per_s > 0
    assert (profile.subject.machine.device == "cpu") == (where == "cpu")
    assert profile.subject.shape.num_layers == profile.model.num_layers == 5
    tokens = {budget.rank: budget.tokens_per_worker for budget in profile.budgets}
    assert f"tokens per worker core: {tokens[8]} at rank 8, " in done.stdout
    assert "measuring takes about" in done.stderr
    assert "s left" in done.stderr
    assert where == "cuda" or "cuda" not in (done.stdout + done.stderr).lower()


@pytest.mark.full
def test_without_a_link_co_execution_is_off_and_a_busy_machine_is_told(tmp_path: Path) -> None:
    output, picture = tmp_path / "here.json", tmp_path / "pictures" / "here.png"
    with _somebody_who_computes():
        options = ["--output", str(output), "--picture", str(picture)]
        options += ["--delta-backend", "numba", "--cpu-threads", "1"]
        done = _profile(tmp_path / "state", *options)
    assert done.returncode == 0, done.stderr
    given = _yaml_options(done, tmp_path)
    assert given == {
        "device": "cpu",
        "cpu_threads": 1,
        "cpu_cores": "none",
        "delta_backend": "numba",
        "profile": str(output),
    }
    profile = _saved(given)
    assert "runs on the CPU itself" in profile.coexecution_off
    assert profile.model.num_workers == 0
    assert "co-execution is off" in done.stdout
    assert profile.quality.is_machine_busy
    assert "corun: warning: the machine was busy" in done.stderr
    assert picture.read_bytes().startswith(_PNG_MAGIC)
    assert not (tmp_path / "state" / "corun" / "profiles").exists()  # --output is the only place


def test_wrong_options_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--budget-s", "-1"]) == 2
    message = "corun: error: --budget-s is '-1', must be a number of seconds above 0\n"
    assert capsys.readouterr().err == message
    assert main(["profile", "--port", "1"]) == 2
    assert "unknown option --port" in capsys.readouterr().err
