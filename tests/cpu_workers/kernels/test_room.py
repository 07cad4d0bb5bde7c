"""The rules of the folder of CPU kernels, and that no kernel outlives its source."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corun.cpu_workers import kernels
from corun.cpu_workers.kernels.simd.compiled import sources_digest

_ROOM = Path(kernels.__path__[0])
_FILES = sorted(_ROOM.rglob("*.py"))
# Files outside of the folder that a digest covers.
_OUTSIDE = {"shm.atomics", "shm.futex", "shm.layout", "shm.park", "shm.region"}
_NO_CODE = "shm.kept_code"  # decides about caching; no kernel contains its code


def _imports(path: Path) -> Iterator[str]:
    """The modules of corun that a file imports, from the package's root on."""
    package = path.relative_to(_ROOM.parents[1]).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = ".".join([*package[: len(package) + 1 - node.level], node.module or ""])
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def test_only_simd_is_shared() -> None:
    wrong = []
    for path in _FILES:
        own = path.relative_to(_ROOM).parts[0]
        room = "cpu_workers.kernels"
        allowed = {f"{room}.simd", f"{room}.{own}", _NO_CODE, *_OUTSIDE}
        wrong += [
            f"{path.relative_to(_ROOM)} imports {target}"
            for target in _imports(path)
            if not any(f"{target}.".startswith(f"{prefix}.") for prefix in allowed)
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_lies_loose() -> None:
    assert {path.name for path in _ROOM.glob("*.py")} == {"__init__.py", "fused.py", "logits.py"}


def test_the_room_knows_no_torch() -> None:
    """Import its modules one after the other in a fresh process: workers have no torch."""
    root = _ROOM.parents[1]
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in _FILES]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(f'corun.{name}')\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_are_kept_in_one_way() -> None:
    """By ``kernel``, which compiles them again after changes."""
    holding = [path.name for path in _FILES if '"cache"' in path.read_text(encoding="utf-8")]
    loose = [path.name for path in _FILES if "cache=True" in path.read_text(encoding="utf-8")]
    assert (holding, loose) == (["compiled.py"], [])


def _load(folder: Path) -> Any:
    """The module of a kernel, as a new process would load it."""
    sources_digest.cache_clear()
    sys.modules.pop("addend", None)
    spec = importlib.util.spec_from_file_location("some_kernel", folder / "some_kernel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_of_a_part_is_a_change_of_the_kernel(tmp_path: Path, monkeypatch: Any) -> None:
    """numba's cache entry of a kernel is used, unless a file beside it has changed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "some_kernel.py").write_text(
        "from corun.cpu_workers.kernels.simd.compiled import kernel\n"
        "from addend import added\n"
        "@kernel('int64(int64)')\n"
        "def increased(x):\n"
        "    return added(x)\n"
    )
    part = (
        "from corun.cpu_workers.kernels.simd.compiled import part\n@part\ndef added(x):\n    return x + {}\n"
    )
    results = []
    for addend in (1, 1, 20):
        (tmp_path / "addend.py").write_text(part.format(addend))
        increased = _load(tmp_path).increased
        results.append((increased(100), sum(increased.stats.cache_hits.values())))
    sys.modules.pop("addend", None)
    sources_digest.cache_clear()
    assert results == [(101, 0), (101, 1), (120, 0)]
