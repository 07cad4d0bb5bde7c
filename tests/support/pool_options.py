"""Pools of workers such as the options of an engine cannot ask for."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from corun.cpu_workers import pool
from corun.cpu_workers.pool import PoolConfig
from support.worker_pool import table_of


@contextlib.contextmanager
def pool_with(num_workers: int, delta_backend: str | None) -> Iterator[None]:
    """More workers than the options can ask for on this machine, and a table if it is clear."""

    def changed(**options: Any) -> PoolConfig:
        config = PoolConfig(**options)
        return replace(
            config,
            worker_cpus=config.worker_cpus * num_workers,
            delta_table=None if delta_backend is None else table_of(delta_backend),
        )

    with unittest.mock.patch.object(pool, "PoolConfig", changed):
        yield
