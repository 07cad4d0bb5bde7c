"""One server with the demo model for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest
from support.devices import DEVICES
from support.serving import Served


@pytest.fixture(scope="session", params=DEVICES)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The demo, with adapters that may be changed while it runs."""
    environment = {"CORUN_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with Served("--device", request.param, "--cpu-threads", "1", environment=environment) as served:
        yield served
