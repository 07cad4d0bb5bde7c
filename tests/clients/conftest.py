"""Clients of other projects, each in an environment of its own; only with ``--clients``."""

from collections.abc import Iterator

import pytest
from support.scripted_model import save_scripted_model
from support.serving import Served

from clients.environments import Install, install_client
from clients.recorder import Recorder


@pytest.fixture(scope="session")
def install() -> Install:
    """The function that makes a client's environment."""
    return install_client


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The demo in float32, so that scores can be compared."""
    with Served("--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The scripted model, whose answers to each request are known."""
    model = tmp_path_factory.mktemp("models") / "scripted"
    save_scripted_model(model)
    with Served(str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def scripted_recorder(request: pytest.FixtureRequest, scripted: Served) -> Iterator[Recorder]:
    """As ``recorder``, before ``scripted``; the client is the test's parameter."""
    with Recorder(scripted.url, request.node.callspec.params["client"]) as recorder:
        yield recorder
        recorder.check(write=request.config.getoption("--record"))


@pytest.fixture
def recorder(request: pytest.FixtureRequest, served: Served) -> Iterator[Recorder]:
    """What stands between the client and ``served``, and knows what the client has sent before."""
    client = request.path.stem.removeprefix("test_")
    with Recorder(served.url, client) as recorder:
        yield recorder
        recorder.check(write=request.config.getoption("--record"))
