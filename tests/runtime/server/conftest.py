"""The real HTTP server over a fake engine."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from corun.runtime.limits import HttpLimits
from corun.runtime.server.app import build_app
from corun.runtime.server.connection import connection_class
from corun.runtime.server.listening import StopSignals, bind
from corun.runtime.server.settings import AppSettings
from corun.runtime.server.state import ServerState, make_state
from corun.runtime.server.supervise import supervise
from support.fake_engine import BASE_NAME, FakeEngine, expected_text
from support.serving import wait_until


class RunningServer:
    """An application behind uvicorn, on a free port, in a thread of its own."""

    def __init__(self, engine: FakeEngine, settings: AppSettings) -> None:
        self.engine = engine
        self.state: ServerState = make_state(engine, settings, now_s=1_700_000_000)
        config = uvicorn.Config(
            build_app(self.state),
            host="127.0.0.1",
            port=0,
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
            http=connection_class(settings.limits, self.state.metrics.connections_ended),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._started = threading.Event()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.port = port

    def is_writing_paused(self) -> bool:
        """Whether writing is paused, as the client does not read."""
        connections: Any = tuple(self._server.server_state.connections)
        return any(connection.flow.write_paused for connection in connections)

    def stop(self) -> None:
        self.engine.held.clear()
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


class SupervisedServer:
    """A server from listening to its exit code, in a thread."""

    def __init__(self, engine: FakeEngine, *, drain_timeout_s: float) -> None:
        self.engine = engine
        self.exit_code: int | None = None
        self._drain_timeout_s = drain_timeout_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(timeout=10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = StopSignals()
        self.state = make_state(self.engine, DEFAULT_SETTINGS, now_s=0)
        with bind("127.0.0.1", 0) as sock:
            self.port = sock.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._loop.call_soon(self._ready.set)
            self.exit_code = await supervise(
                self.state, sock, self._stop, drain_timeout_s=self._drain_timeout_s
            )

    def signal(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.receive)

    def join(self) -> int | None:
        """Wait for the end and return the exit code."""
        self._thread.join(timeout=15)
        assert not self._thread.is_alive()
        return self.exit_code


@contextmanager
def running_server(engine: FakeEngine, settings: AppSettings) -> Iterator[RunningServer]:
    """Run a server for the duration of a block."""
    server = RunningServer(engine, settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


DEFAULT_SETTINGS = AppSettings(
    served_names=(BASE_NAME, "alias"), version="1.2.3", limits=HttpLimits(max_body_bytes=100_000)
)


@contextmanager
def _starting_servers() -> Iterator[Callable[..., RunningServer]]:
    with ExitStack() as stack:

        def start(engine: FakeEngine, **changes: Any) -> RunningServer:
            settings = dataclasses.replace(DEFAULT_SETTINGS, **changes)
            return stack.enter_context(running_server(engine, settings))

        yield start


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Start servers with the test's settings; they stop with the test."""
    with _starting_servers() as start:
        yield start


@pytest.fixture(scope="module")
def start_module_server() -> Iterator[Callable[..., RunningServer]]:
    """As ``start_server``; they stop with the module."""
    with _starting_servers() as start:
        yield start


@pytest.fixture
def supervised() -> Callable[..., SupervisedServer]:
    """Start a supervised server; the test must end it."""
    return lambda **options: SupervisedServer(FakeEngine(), **options)


@pytest.fixture(scope="module")
def module_server() -> Iterator[RunningServer]:
    """One server for a module, as starting and stopping one takes most of a short test's time."""
    with running_server(FakeEngine(), DEFAULT_SETTINGS) as running:
        yield running


@pytest.fixture
def server(module_server: RunningServer) -> RunningServer:
    """A server with default settings and without earlier requests."""
    module_server.engine.held.clear()
    wait_until(lambda: module_server.engine.num_open == 0)
    module_server.engine.reset()
    module_server.state.draining = False
    return module_server


@pytest.fixture
def engine(server: RunningServer) -> FakeEngine:
    """The fake engine behind ``server``."""
    return server.engine


@pytest.fixture(scope="module")
def module_http(module_server: RunningServer) -> Iterator[httpx.Client]:
    """One client for a module, as making one reads all certificates of the machine."""
    with httpx.Client(base_url=module_server.url, timeout=20) as client:
        yield client


@pytest.fixture
def http(server: RunningServer, module_http: httpx.Client) -> httpx.Client:
    """A plain HTTP client of ``server``."""
    return module_http


@pytest.fixture(scope="session", name="expected_text")
def expected_text_function() -> Callable[..., str]:
    """The function that returns the text that the fake engine generates."""
    return expected_text


@pytest.fixture(scope="session", name="wait_until")
def wait_until_function() -> Callable[..., None]:
    """The function that waits for a condition."""
    return wait_until
