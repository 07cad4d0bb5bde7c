"""One server with the demo model for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest
from support.serving import Served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """The demo, with adapters that may be changed while it runs."""
    with Served(environment={"CORUN_ALLOW_RUNTIME_LORA_UPDATING": "1"}) as served:
        yield served
