"""A virtual environment for each client, made once."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_ENVIRONMENTS = Path(__file__).parents[2] / ".venv" / "clients"
_INSTALL_TIMEOUT_S = 1500

Install = Callable[..., Path]


def install_client(name: str, *requirements: str, without_dependencies: str = "") -> Path:
    """Make the client's environment if it is not there, and return where its commands are."""
    home = _ENVIRONMENTS / name
    wanted = hashlib.sha256(repr((requirements, without_dependencies)).encode()).hexdigest()
    stamp = home / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        commands = [[*pip, *requirements]]
        if without_dependencies:
            commands.insert(0, [*pip, "--no-deps", without_dependencies])
        for command in commands:
            subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S)
        stamp.write_text(wanted)
    return home / "bin"
