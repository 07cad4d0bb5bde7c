"""What ``corun serve`` checks before it starts an engine."""

from pathlib import Path

import pytest
from corun.runtime import file_calls
from corun.runtime.cli.serve import check_paths
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.serve import ServeConfig
from corun.runtime.errors import ConfigError


def test_directories_that_the_options_name_exist_or_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for path, reason in (("x", "no such directory"), ("file", "not a directory")):
        directory = str(tmp_path / path)
        for engine, serve in (
            (EngineConfig(lora_dir=directory), ServeConfig()),
            (EngineConfig(lora_modules=(f"a={directory}",)), ServeConfig()),
            (EngineConfig(), ServeConfig(allowed_lora_dirs=(directory,))),
        ):
            with pytest.raises(ConfigError, match=f"{directory}: {reason}"):
                check_paths(engine, serve)
    monkeypatch.setattr(file_calls, "is_directory", lambda path: None)
    check_paths(EngineConfig(lora_dir="/mnt/dead"), ServeConfig(allowed_lora_dirs=("/mnt/dead",)))
