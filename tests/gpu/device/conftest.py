"""The CUDA device on a GPU of threads, on every rung, or where waits do not hold the caller."""

from collections.abc import Iterator

import pytest
from support.cuda_setting import COMBINATIONS, NAMES, NOT_BLOCKING, Setting, open_setting


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    options = dict(zip(NAMES, request.param, strict=True))
    with open_setting(**options, bounce_chunk_bytes=1 << 14, num_bounce_chunks=2) as made:
        yield made


@pytest.fixture(params=NOT_BLOCKING, ids="-".join)
def ahead(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """Where waits do not hold the caller."""
    with open_setting(**dict(zip(NAMES, request.param, strict=True))) as made:
        yield made
