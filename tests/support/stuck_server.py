"""``corun serve`` with a stand-in for attention that is slow or does not return."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from corun.runtime.cli import serve
from corun.runtime.cli.main import main
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import EngineAssembly, build_engine
from corun.runtime.engine.spawn import spawn_engine
from support.serving import Served

FILE_VARIABLE = "CORUN_TEST_STUCK"
STUCK = "stuck"
_TESTS = Path(__file__).parents[1]


class StuckServer(Served):
    """A server with a model whose layers the test delays."""

    def __init__(self, file: Path, *arguments: str) -> None:
        """``file``: holds what attention does; a test writes it by ``delay``."""
        self._file = file
        paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        super().__init__(
            *arguments,
            command=[sys.executable, "-P", "-m", __name__],
            environment={FILE_VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(paths)},
        )

    def delay(self, what: str) -> None:
        """Delay each layer by so many seconds, or ``STUCK``; "" = not at all."""
        whole = self._file.with_suffix(".new")
        whole.write_text(what)
        whole.rename(self._file)


def build(config: EngineConfig, *, on_progress: Callable[[str], None], own_process: bool) -> EngineAssembly:
    """Build the engine of such a server, in its own process."""
    assembly = build_engine(config, on_progress=on_progress, own_process=own_process)
    file = Path(os.environ[FILE_VARIABLE])
    backend: Any = assembly.parts.loaded.attention_backend
    forward = backend.forward

    def forward_when_let(*arguments: Any) -> Any:
        what = file.read_text() if file.exists() else ""
        while what == STUCK:
            time.sleep(0.02)
        time.sleep(float(what or 0))
        return forward(*arguments)

    backend.forward = forward_when_let
    return assembly


if __name__ == "__main__":
    factory = "support.stuck_server:build"
    with mock.patch.object(serve, "spawn_engine", partial(spawn_engine, factory=factory)):
        sys.exit(main())
