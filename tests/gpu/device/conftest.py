"""The CUDA device on a GPU of threads: with both mechanisms, or only where waits hold streams."""

from collections.abc import Iterator

import pytest
from support.cuda.setting import Setting, open_setting


@pytest.fixture(params=["stream", "host"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    with open_setting(sync=request.param, bounce_chunk_bytes=1 << 14, num_bounce_chunks=2) as made:
        yield made


@pytest.fixture
def ahead() -> Iterator[Setting]:
    """The mechanism with waits that do not hold the caller."""
    with open_setting(sync="stream") as made:
        yield made
