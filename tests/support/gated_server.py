"""``corun serve`` with gates for reading files and copying adapters, under a test's control."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from corun.profiles.link import Direction
from corun.runtime.cli import serve
from corun.runtime.cli.main import main
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.assembly.build import EngineAssembly, build_engine
from corun.runtime.engine.spawn import spawn_engine
from support.gated_files import FolderGate
from support.serving import Served

FOLDER_VARIABLE = "CORUN_TEST_GATES"
_TESTS = Path(__file__).parents[1]
_patches = ExitStack()  # until the process ends


class GatedServer(Served):
    """A server with gates, initially open."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """``folder``: of files through which the processes communicate."""
        self.files, self.link = _gates(folder)  # a tensor at a time; a layer group at a time
        paths = [str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "CORUN_ALLOW_RUNTIME_LORA_UPDATING": "1",
            FOLDER_VARIABLE: str(folder),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        super().__init__(*arguments, environment=environment, command=[sys.executable, "-P", "-m", __name__])

    def close(self) -> None:
        """End it with the gates open."""
        self.files.open()
        self.link.open()
        super().close()


def build(config: EngineConfig, *, on_progress: Callable[[str], None], own_process: bool) -> EngineAssembly:
    """Build the engine of such a server, in its own process."""
    files, gate = _gates(Path(os.environ[FOLDER_VARIABLE]))
    _patches.enter_context(files.before_files())
    assembly = build_engine(config, on_progress=on_progress, own_process=own_process)
    link: Any = assembly.parts.loaded.device.link
    begin = link.begin

    def begin_when_let(direction: Direction, num_bytes: int, **options: Any) -> Any:
        if direction is Direction.TO_DEVICE:
            gate.take()
        return begin(direction, num_bytes, **options)

    link.begin = begin_when_let
    return assembly


def _gates(folder: Path) -> tuple[FolderGate, FolderGate]:
    return FolderGate(folder / "files"), FolderGate(folder / "link")


if __name__ == "__main__":
    factory = "support.gated_server:build"
    with mock.patch.object(serve, "spawn_engine", partial(spawn_engine, factory=factory)):
        sys.exit(main())
