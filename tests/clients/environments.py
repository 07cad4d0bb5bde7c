"""An environment for each client, made once."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_ENVIRONMENTS = Path(__file__).parents[2] / ".venv" / "clients"
_INSTALL_TIMEOUT_S = 1500

Install = Callable[..., Path]


def install_client(name: str, *requirements: str, without_dependencies: str = "") -> Path:
    """Make the client's environment if it is not there, and return where its commands are."""
    home = _ENVIRONMENTS / name
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(home)]]
    if without_dependencies:
        commands.append([*pip, "--no-deps", without_dependencies])
    _make(home, (requirements, without_dependencies), [*commands, [*pip, *requirements]])
    return home / "bin"


def install_packages(name: str, *packages: str) -> Path:
    """Make a folder with packages of npm if it is not there, and return it."""
    home = _ENVIRONMENTS / name
    npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *packages]
    _make(home, packages, [npm])
    return home


def _make(home: Path, wanted: Sequence[object], commands: Sequence[Sequence[str]]) -> None:
    """Run ``commands`` unless they made ``home`` from what is ``wanted`` before."""
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()
    stamp = home / "installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for command in commands:
        subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S)
    stamp.write_text(digest)
