"""Makes a checkout importable as ``corun`` where the package is not installed.

The repository's root is the package, so a directory with a link named ``corun`` on the path does.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def make_importable() -> str:
    """Let this process and its children import this checkout; returns how, for the report.

    To be called before ``corun`` is imported. The link goes when this process ends.
    """
    _add_for_children(ROOT / "bench")
    if _is_importable():
        return "installed"
    folder = Path(tempfile.mkdtemp(prefix="corun-import-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "corun").symlink_to(ROOT)
    sys.path.insert(0, str(folder))
    _add_for_children(folder)
    return "linked"


def _is_importable() -> bool:
    """Whether ``corun`` is this checkout; another one is not meant."""
    spec = importlib.util.find_spec("corun")
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).resolve().parent == ROOT


def _add_for_children(folder: Path) -> None:
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        paths.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
