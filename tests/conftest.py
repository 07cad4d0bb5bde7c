"""Common setup of tests: no network, GPU tests only with a GPU, a time budget per folder."""

import gc
import logging
import os
import sys
import tempfile
import tomllib
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.time_budget import TimeBudget

# Before any library is imported, here and in the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_STATE: tempfile.TemporaryDirectory[str] | None = None
if "PYTEST_XDIST_WORKER" in os.environ:
    # With one thread per processor in each of several processes, threads would wait for each other
    # at every barrier. Engines in processes of their own set their own number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # numba's threads have another number. After each kernel they would spin for milliseconds, on
    # processors that other processes of the run want.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
else:
    # What engines measure and keep must not reach the user's own. The processes of a run share it.
    _STATE = tempfile.TemporaryDirectory(prefix="corun-tests-")
    os.environ["XDG_STATE_HOME"] = _STATE.name

# A busy machine takes long for an example now and then. All runs have the same examples.
settings.register_profile(
    "corun", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("corun")

_ROOT = Path(__file__).parent.parent
# Markers of tests that run only with the option of that name.
_WITH_OPTION = {
    "full": "repeats other tests, or runs a benchmark: make test-full",
    "clients": "installs clients: make test-clients",
    "ray": "runs Ray: make test-ray",
    "faults": "attacks a server for minutes: make test-faults",
    "soak": "loads a server for an hour: make test-faults ARGS=--soak",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run also what repeats other tests, on lower levels of instructions",
    )
    parser.addoption(
        "--clients",
        action="store_true",
        help="run also clients of other projects, which are installed for it",
    )
    parser.addoption("--ray", action="store_true", help="run also what needs Ray, which is installed for it")
    parser.addoption("--faults", action="store_true", help="run also attacks on a server, and their times")
    parser.addoption(
        "--soak",
        nargs="?",
        type=float,
        const=60.0,
        metavar="MINUTES",
        help="with --faults: also load a server for this long, by default an hour",
    )
    parser.addoption(
        "--soak-record",
        type=Path,
        metavar="FILE",
        help="with --soak: append the samples to this file as lines of JSON",
    )
    parser.addoption("--record", action="store_true", help="with --clients: record anew what they send")


def pytest_configure(config: pytest.Config) -> None:
    settings = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    num_processes = getattr(config.option, "numprocesses", None)
    # Tests that share the processors take longer, though all of them are done sooner.
    factor = num_processes if isinstance(num_processes, int) and num_processes else 1
    budgets_s = {
        folder: factor * seconds for folder, seconds in settings["tool"]["corun"]["test-budget-s"].items()
    }
    budgets_s["tests/faults"] += 100 * (config.getoption("--soak") or 0)  # with its second server
    budget = TimeBudget(budgets_s)
    if not hasattr(config, "workerinput"):  # the process that started the others adds up
        config.pluginmanager.register(budget, "corun-time-budget")


def pytest_unconfigure() -> None:
    if _STATE is not None:
        _STATE.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Imports and tests make no garbage, and millions of objects.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        _keep_choices()
    # Thousands of tests with their imports live until the end. Garbage collections over them are
    # slow, and tests request many. A collection here would take a second of each process.
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Runs with several processes (``-n 2 --dist loadgroup``) keep to the groups."""
    if config.getoption("dist") != "loadgroup":
        return None
    from support.process_groups import GroupScheduling

    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {name: why for name, why in _WITH_OPTION.items() if not config.getoption(f"--{name}")}
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        for name in reasons.keys() & names:
            item.add_marker(pytest.mark.skip(reason=reasons[name]))
        if "gpu" in names and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def repository() -> Path:
    """The root of the working tree, which is also the root of the package."""
    return _ROOT


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For engines in this process on tiny models: more threads would wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that run a command in this process, which configures logging for later tests."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    # Those of pytest are of other classes.
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)


def _keep_choices() -> None:
    """Let starts of tests find what they would choose on a machine that is busy.

    There each of them would measure for seconds, and keep nothing.
    """
    import torch
    from corun.gpu.kept_choices import choice_path
    from corun.gpu.linear.select import BACKENDS
    from corun.runtime.kept_records import write_record

    state = Path(os.environ["XDG_STATE_HOME"], "corun")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        able = [name for name, backend in BACKENDS.items() if dtype in (backend.dtypes or (dtype,))]
        for num_threads in range(1, (os.cpu_count() or 1) + 1):
            path = choice_path(state, "linear", str(dtype), num_threads, able)
            assert path is not None
            write_record(path, able[0], "tests measure")


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
