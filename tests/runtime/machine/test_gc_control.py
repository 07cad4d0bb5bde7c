"""Imports run without the collector, and what they made is not looked at again."""

import gc
import os
import subprocess
import sys

import pytest
from corun.runtime.machine.gc_control import collection_paused

_FRONT_END = """
import asyncio, gc
from support.fake_core import FACTORY
from corun.runtime.config.engine import EngineConfig
from corun.runtime.demo import demo_model_path
from corun.runtime.engine.client import ProcessClient
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.server.run import _start
from corun.runtime.server.listening import StopSignals

async def start(owns_process):
    client = ProcessClient(EngineConfig(model=str(demo_model_path())), factory=FACTORY)
    engine = AsyncEngine.from_client(client)
    try:
        assert await _start(engine, StopSignals(), owns_process=owns_process)
    finally:
        await engine.shutdown()
    return gc.get_freeze_count(), gc.isenabled()

count, is_enabled = asyncio.run(start(False))
assert count == 0 and is_enabled, (count, is_enabled)
count, is_enabled = asyncio.run(start(True))
assert count > 10_000 and is_enabled, (count, is_enabled)
"""


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_pause_ends_as_it_began(is_enabled: bool) -> None:
    if not is_enabled:
        gc.disable()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
        with pytest.raises(ValueError, match="inside"), collection_paused():
            raise ValueError("inside")
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_a_server_keeps_what_it_imported_in_a_process_of_its_own_alone(pytestconfig: pytest.Config) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FRONT_END],
        env=os.environ | {"PYTHONPATH": str(pytestconfig.rootpath / "tests")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
