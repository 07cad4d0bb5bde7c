"""CPU workers are killed and stopped under load: no client notices."""

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from corun.runtime.demo import demo_adapters_path
from safetensors.torch import load_file
from support.assisted_server import all_processes, assisted_options, running
from support.demo_answers import ADAPTERS, BASE, Question, ask_all, questions
from support.peft_adapters import WEIGHTS, edit_tensors
from support.serving import Served, wait_until

UNREAD = "-unread"  # adapters with values that nothing has read
NUM_QUESTIONS = 3  # of each adapter
SAMPLE_S = 0.08
JOB_WAITS_S = 0.4  # after the requests: then a pass waits for a stopped worker
RESTART_TIMEOUT_S = 60.0
BOOT_TIME_ERROR_S = 1.0  # of a process's age: the system tells when it was booted in whole seconds
MAX_ROUNDS = 6  # until a hit falls into a pass that workers assist
FAULTS = ("corun:cpu_worker_failed_jobs_total", "corun:retried_rows_total")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = assisted_options(tmp_path_factory.mktemp("profile"))
    folder = tmp_path_factory.mktemp("unread")
    for name in ADAPTERS:
        shutil.copytree(demo_adapters_path() / name, folder / f"{name}{UNREAD}")
    shutil.copytree(demo_adapters_path() / ADAPTERS[0], folder / "bad")
    *_, last = sorted(load_file(folder / "bad" / WEIGHTS))
    edit_tensors(folder / "bad", **{last: lambda tensor: torch.full_like(tensor, torch.nan)})
    options += ["--lora-dir", str(folder)]
    environment = {"CORUN_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Served(*options, environment=environment) as served:
        yield served
        processes = all_processes(served)
        served.process.terminate()
        assert served.process.wait(20) == 0
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


def asked_of(suffix: str) -> list[Question]:
    """The same questions, with new names of the adapters."""
    found = [
        replace(one, model=one.model if one.model == BASE else one.model + suffix)
        for model in (*ADAPTERS, BASE)
        for one in questions(model, model if model != BASE else ADAPTERS[0], NUM_QUESTIONS)
    ]
    return [replace(one, options={"temperature": 0}) for one in found]


def make_cold(server: Served, suffix: str) -> None:
    """Register all adapters under new names: these are not on the device."""
    for name in ADAPTERS:
        body = {"lora_name": name + suffix, "lora_path": str(demo_adapters_path() / name)}
        answer = server.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def expected(server: Served) -> list[str]:
    make_cold(server, "-quiet")
    return ask_all(server.url, asked_of("-quiet"))


def test_cold_and_warm_answer_the_same(server: Served, expected: list[str]) -> None:
    metrics = server.metrics()
    assert metrics["corun:adapter_cold_starts_total"] > 0
    # Rows may be computed again: a pass waits 0.25 s for a file, which can be too short.
    assert metrics["corun:cpu_worker_failed_jobs_total"] == 0
    assert ask_all(server.url, asked_of("-quiet")) == expected


def test_first_uses_answer_as_warm_requests_do(server: Served, expected: list[str]) -> None:
    """Their values are read while the first requests begin."""
    found = adapter(server, ADAPTERS[0] + UNREAD)
    assert (found["state"], found["version"]) == ("ready", "")
    assert ask_all(server.url, asked_of(UNREAD)) == expected
    found = adapter(server, ADAPTERS[0] + UNREAD)
    assert found["version"] == adapter(server, f"{ADAPTERS[0]}-quiet")["version"] != ""


def test_a_first_use_of_bad_values_fails_with_the_reason(server: Served) -> None:
    body = {"model": "bad", "prompt": "abc", "max_tokens": 4}
    for _ in range(2):  # as its values are read, and afterwards
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "adapter_failed"
        assert "not finite" in refused.json()["error"]["message"]
    assert adapter(server, "bad")["state"] == "failed"


def adapter(server: Served, name: str) -> dict[str, Any]:
    """Its published state."""
    with server.client() as http:
        found: dict[str, Any] = http.get(f"/v1/lora_adapters/{name}").json()
    return found


@pytest.mark.parametrize(
    ("modules", "number"),
    [
        # tests/parity/test_coexecution_faults.py kills workers, too.
        pytest.param(("worker",), signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(("worker",), signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(("supervisor",), signal.SIGKILL, marks=pytest.mark.full),
        (("supervisor", "worker"), signal.SIGSTOP),
    ],
)
def test_faults_under_load(
    server: Served, expected: list[str], modules: tuple[str, ...], number: signal.Signals
) -> None:
    """Processes are hit when they are needed, while cold and warm requests run."""
    before = server.metrics()
    all_hits: list[int] = []
    for round_ in range(MAX_ROUNDS):
        hits: list[int] = []
        suffix = f"-{'-'.join(modules)}-{number}-{round_}"
        make_cold(server, suffix)
        with hitting(server, modules, number, hits), ThreadPoolExecutor() as pool:
            cold = [one for one in asked_of(suffix) if one.model != BASE]
            cold_texts = pool.submit(ask_all, server.url, cold)
            # Beside warm requests, cold ones would wait so as not to delay them.
            time.sleep(JOB_WAITS_S)
            assert ask_all(server.url, asked_of("-quiet")) == expected
            assert cold_texts.result() == expected[: len(cold)]
        all_hits += hits
        wait_until(partial(is_whole, server, all_hits), RESTART_TIMEOUT_S)
        after = server.metrics()
        if all(after[name] > before[name] for name in FAULTS):
            break
    else:
        raise AssertionError("no pass was ever hit")


@contextlib.contextmanager
def hitting(
    server: Served, modules: tuple[str, ...], number: signal.Signals, hits: list[int]
) -> Iterator[None]:
    """Send the signal to all processes of these modules whenever a worker has a job.

    A worker computes only for a short and varying time. So the workers are stopped when the
    requests arrive: the first pass with their help then waits for them.
    """
    is_over = threading.Event()
    # A supervisor is restarted only a limited number of times.
    is_once = "supervisor" in modules

    def send(number: signal.Signals, modules: tuple[str, ...]) -> None:
        for process in (p for module in modules for p in running(server, module)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                hits.append(process.pid)

    def hit() -> None:
        is_over.wait(JOB_WAITS_S)
        send(number, modules)
        while not is_over.is_set() and not is_once:
            # One that is stopped while it starts is given two minutes.
            is_target = number != signal.SIGSTOP or ready_workers(server)
            if is_target and is_computing(server):
                send(number, modules)

    send(signal.SIGSTOP, ("worker",))
    thread = threading.Thread(target=hit)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def is_computing(server: Served) -> bool:
    """Whether a worker has a job: it computes briefly, and otherwise sleeps."""
    workers = running(server, "worker")
    with contextlib.suppress(psutil.NoSuchProcess):
        before_s = sum(worker.cpu_times().user for worker in workers)
        time.sleep(SAMPLE_S)
        return sum(worker.cpu_times().user for worker in workers) - before_s >= SAMPLE_S / 4
    return False


def is_whole(server: Served, all_hits: list[int]) -> bool:
    """Whether all processes that were hit have been replaced."""
    is_replaced = not set(all_hits) & {process.pid for process in all_processes(server)}
    return is_replaced and bool(ready_workers(server))


def ready_workers(server: Served) -> list[psutil.Process]:
    """Workers that certainly accept jobs: they are older than the engine's statistics.

    A pass with a stopped worker takes long, and earlier statistics are of another worker.
    """
    asked_s = time.time()
    metrics = server.metrics()
    if metrics["corun:cpu_workers_ready"] != 1:
        return []
    told_s = asked_s - metrics["corun:engine_state_age_seconds"] - BOOT_TIME_ERROR_S
    with contextlib.suppress(psutil.NoSuchProcess):
        return [one for one in running(server, "worker") if one.create_time() < told_s]
    return []
