"""Each process of a server is killed and stopped while requests run, with CPU workers and without.

A request goes on correctly or ends with an error event, and nothing is left of a server that ends.
"""

import json
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import httpx
import psutil
import pytest
from corun.runtime.demo import demo_adapters_path
from corun.runtime.exit_codes import EXIT_DONE, EXIT_ENGINE_HUNG, EXIT_FAILED
from support.assisted_server import all_processes, assisted_options, running
from support.attacked import Rows
from support.demo_answers import ADAPTERS, BASE, Question, ask_all, questions
from support.residue import assert_nothing_left, shared_memory_of
from support.serving import Served, wait_until

pytestmark = pytest.mark.faults

HANG_S = 1.5  # --engine-hang-s
STOPPED_S = 1.0  # shorter than that
TIMEOUT_S = 60.0
JOB_WAITS_S = 0.4  # after the requests: then a pass waits for a stopped worker
NUM_QUESTIONS = 2  # of each adapter
NUM_BASE_STREAMS = 4
UPDATES = {"CORUN_ALLOW_RUNTIME_LORA_UPDATING": "1"}
CUT = "cut"
STOP, KILL, CONTINUE, END = signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT, signal.SIGTERM
Sent = tuple[tuple[str, signal.Signals], ...]  # to which processes, in this order


@dataclass(frozen=True)
class Case:
    """Signals that end a server, and its end."""

    sent: Sent
    outcomes: frozenset[str]  # of the requests that run
    exit_code: int


DEAD, ENDING = frozenset({"engine_dead"}), frozenset({"shutting_down", "engine_dead"})
ENDS = {
    "engine killed": Case((("engine", KILL),), DEAD, EXIT_FAILED),
    "engine stopped": Case((("engine", STOP),), DEAD, EXIT_ENGINE_HUNG),
    "engine stopped, then SIGTERM": Case((("engine", STOP), ("API", END)), ENDING, EXIT_DONE),
    "API killed": Case((("API", KILL),), frozenset({CUT}), -KILL),
}
ENDS_WITH_WORKERS = {
    "workers stopped, engine killed": Case((("worker", STOP), ("engine", KILL)), DEAD, EXIT_FAILED),
    "workers and engine stopped": Case((("worker", STOP), ("engine", STOP)), DEAD, EXIT_ENGINE_HUNG),
    "all others stopped, API killed": Case(
        (("worker", STOP), ("supervisor", STOP), ("engine", STOP), ("API", KILL)), frozenset({CUT}), -KILL
    ),
}
SURVIVED: dict[str, Sent] = {
    "worker killed": (("worker", KILL),),
    "worker stopped": (("worker", STOP),),
    "supervisor killed": (("supervisor", KILL),),
    "supervisor and worker stopped": (("supervisor", STOP), ("worker", STOP)),
}


class Streamed:
    """A stream in a thread, with how it ended."""

    def __init__(self, server: Served, model: str, number: int) -> None:
        self.num_events = 0
        self._last = ""
        self._url = server.url + "/v1/completions"
        self._body = {
            "model": model,
            "prompt": f"{number} planets",
            "max_tokens": 450,
            "min_tokens": 450,
            "ignore_eos": True,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def outcome(self) -> str:
        """Wait for the end; the code of its error, ``done`` or ``CUT``."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a request has no end"
        if self._last == "data: [DONE]":
            return "done"
        text = self._last.removeprefix("data: ")
        error = json.loads(text).get("error") if text.startswith("{") else None
        return CUT if error is None else str(error["code"])

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=TIMEOUT_S) as answer:
                for line in answer.iter_lines():
                    if line:
                        self._last = line
                        self.num_events += 1
        except httpx.TransportError:
            pass


def send(server: Served, sent: Sent) -> list[int]:
    """Send signals; return the processes that got them."""
    pids = []
    for name, number in sent:
        if name == "API":
            found = [psutil.Process(server.process.pid)]
        elif name == "engine":
            found = [server.engine]
        else:
            found = running(server, name)
            assert found, f"there is no {name}"
        for process in found:
            process.send_signal(number)
            pids.append(process.pid)
    return pids


def make_cold(server: Served, suffix: str) -> None:
    """Register all adapters under new names: these are not on the device."""
    for name in ADAPTERS:
        body = {"lora_name": name + suffix, "lora_path": str(demo_adapters_path() / name)}
        answer = server.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 200, answer.text


def asked_of(suffix: str) -> list[Question]:
    """The same questions of all adapters, with this end of their names, and of the base model."""
    found = [
        replace(one, model=one.model if one.model == BASE else one.model + suffix)
        for model in (*ADAPTERS, BASE)
        for one in questions(model, model if model != BASE else ADAPTERS[0], NUM_QUESTIONS)
    ]
    return [replace(one, options={"temperature": 0}) for one in found]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[str]]:
    """Of servers without workers and with them."""
    common = ["--engine-hang-s", str(HANG_S), "--drain-timeout-s", "1"]
    assisted = assisted_options(tmp_path_factory.mktemp("profile"))
    return {
        False: [*common, "--device", "cpu", "--memory-gib", "0.25", "--cpu-threads", "1"],
        True: [*common, *assisted],
    }


@pytest.fixture(scope="module")
def assisted(options: dict[bool, list[str]]) -> Iterator[Served]:
    with Served(*options[True], environment=UPDATES) as served:
        yield served
        processes = all_processes(served)
        shared_memory = shared_memory_of(processes)
        served.process.terminate()
        assert served.process.wait(TIMEOUT_S) == EXIT_DONE
        assert_nothing_left(processes, shared_memory)


@pytest.fixture(scope="module")
def expected(assisted: Served) -> list[str]:
    make_cold(assisted, "-quiet")
    return ask_all(assisted.url, asked_of("-quiet"))


@pytest.mark.parametrize("name", SURVIVED)
def test_workers(assisted: Served, expected: list[str], rows: Rows, name: str) -> None:
    """Each request is answered as without the fault, and the processes are replaced."""
    suffix = f"-{name.replace(' ', '-')}"
    make_cold(assisted, suffix)
    hit: list[int] = []
    timer = threading.Timer(JOB_WAITS_S, lambda: hit.extend(send(assisted, SURVIVED[name])))
    began_s = time.monotonic()
    timer.start()
    try:
        texts = ask_all(assisted.url, asked_of(suffix))
    finally:
        timer.join()
    took_s = time.monotonic() - began_s
    assert hit and texts == expected
    wait_until(partial(is_whole, assisted, hit), TIMEOUT_S)
    replaced_s = time.monotonic() - began_s - JOB_WAITS_S
    rows.add(name, f"{len(texts)} right in {took_s:.1f} s, replaced after {replaced_s:.1f} s")


def is_whole(server: Served, hit: list[int]) -> bool:
    """Whether all processes that were hit have been replaced."""
    is_replaced = not set(hit) & {process.pid for process in all_processes(server)}
    return is_replaced and server.metrics()["corun:cpu_workers_ready"] == 1


def begin(server: Served, *, with_cold: bool) -> list[Streamed]:
    """Start streams of the base model and of all adapters, and wait until some run."""
    suffix = ""
    if with_cold:
        suffix = "-cold"
        make_cold(server, suffix)
    models = [BASE] * NUM_BASE_STREAMS + [name + suffix for name in ADAPTERS]
    streams = [Streamed(server, model, number) for number, model in enumerate(models)]
    wait_until(lambda: any(one.num_events > 2 for one in streams), TIMEOUT_S)
    return streams


def text_of(server: Served) -> str:
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def ask_into(server: Served, found: list[str]) -> None:
    found.append(text_of(server))


def test_processes_that_are_stopped_for_a_while(options: dict[bool, list[str]], rows: Rows) -> None:
    with Served(*options[False]) as server:
        expected = text_of(server)
        for process in ("API", "engine"):
            found: list[str] = []
            thread = threading.Thread(target=partial(ask_into, server, found))
            thread.start()
            send(server, ((process, STOP),))
            time.sleep(STOPPED_S)
            send(server, ((process, CONTINUE),))
            thread.join(TIMEOUT_S)
            assert found == [expected]
            assert httpx.get(server.url + "/ready", timeout=TIMEOUT_S).status_code == 200
            rows.add(f"{process} stopped for {STOPPED_S:g} s", "goes on")


def check_end(server: Served, name: str, case: Case, rows: Rows, *, with_workers: bool) -> None:
    """Send the signals while requests run, and judge the end of the requests and the server."""
    streams = begin(server, with_cold=with_workers)
    processes = all_processes(server)
    shared_memory = shared_memory_of(processes)
    began_s = time.monotonic()
    for one in case.sent:
        send(server, (one,))
        time.sleep(JOB_WAITS_S if one == ("worker", STOP) else 0.0)  # a pass waits for it
    if case.exit_code == EXIT_ENGINE_HUNG:
        wait_until(lambda: is_hung(server), TIMEOUT_S)
    outcomes = Counter(one.outcome() for one in streams)
    ended_s = time.monotonic() - began_s
    exit_code = server.process.wait(TIMEOUT_S)
    text = ", ".join(f"{number} x {outcome}" for outcome, number in sorted(outcomes.items()))
    rows.add(
        f"{name}, {'workers' if with_workers else 'no workers'}",
        f"{text} after {ended_s:.1f} s, exit {exit_code}",
    )
    assert outcomes.keys() <= case.outcomes | {"done"}, outcomes
    assert outcomes.keys() & case.outcomes, "no request ran when the signals were sent"
    assert exit_code == case.exit_code
    assert_nothing_left(processes, shared_memory)


def is_hung(server: Served) -> bool:
    """Whether the server is not ready and says why, but lives."""
    answer = httpx.get(server.url + "/ready", timeout=TIMEOUT_S)
    if answer.status_code == 200:
        return False
    assert answer.json()["error"]["code"] == "engine_hung", answer.text
    assert httpx.get(server.url + "/health", timeout=TIMEOUT_S).status_code == 200
    return True


@pytest.fixture(scope="module")
def ending(options: dict[bool, list[str]], request: pytest.FixtureRequest) -> Iterator[Iterator[Served]]:
    """A server for each test that ends one; the next starts meanwhile."""
    kinds = [
        item.function is test_ends_with_workers
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function in (test_ends, test_ends_with_workers)
    ]
    with ThreadPoolExecutor(1) as pool:
        starting = deque[Future[Served]]()

        def begin_next() -> None:
            if kinds:
                start = partial(Served, *options[kinds.pop(0)], environment=UPDATES)
                starting.append(pool.submit(start))

        def servers() -> Iterator[Served]:
            begin_next()
            while starting:
                server = starting.popleft().result()
                begin_next()
                yield server

        yield servers()
        for one in starting:  # a test before it has failed
            one.result().close()


@pytest.mark.parametrize("name", ENDS)
def test_ends(ending: Iterator[Served], rows: Rows, name: str) -> None:
    with next(ending) as server:
        check_end(server, name, ENDS[name], rows, with_workers=False)


@pytest.mark.parametrize("name", ENDS_WITH_WORKERS)
def test_ends_with_workers(ending: Iterator[Served], rows: Rows, name: str) -> None:
    with next(ending) as server:
        check_end(server, name, ENDS_WITH_WORKERS[name], rows, with_workers=True)
