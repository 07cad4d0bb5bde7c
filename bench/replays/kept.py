"""Results of cells on disk: an interrupted run continues with the missing ones.

A cell is stored under the digest of the code that decides it: scheduler, memory, cold starts,
engine core, simulator, its own policies and this folder's ``cells.py``, but not other policies.
Comments and docstrings do not count.
"""

import ast
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import corun
from corun.runtime.sim.figures import Figures

from replays.cells import BASELINE, TIED, Cell

PRODUCT = Path(corun.__file__).parent
_CELLS = Path(__file__).with_name("cells.py")
_DECIDING = """
    profiles/*.py runtime/*.py runtime/adapters/*.py runtime/coldstart/*.py
    runtime/engine/core.py runtime/engine/messages.py runtime/engine/stats.py
    runtime/memory/**/*.py runtime/scheduler/**/*.py runtime/sim/**/*.py
    shm/arena_ranges.py shm/region.py shm/errors.py cpu_workers/teams.py
""".split()
_QUEUES = ("papers/chameleon/*.py",)
_OWN: Mapping[str, Sequence[str]] = {
    BASELINE: (),  # these three are in ``keyed.py``, which counts for all
    "fcfs": (),
    "sjf": (),
    "corun": ("corun.py",),
    "chameleon": _QUEUES,
    "chameleon-paper": _QUEUES,
    "output-only": _QUEUES,
}
_LRU = ("policies/lru.py",)
_BASELINE = (*_LRU, "papers/baselines.py")
_OWN_OF_MEMORY: Mapping[str, Sequence[str]] = {
    "corun": ("policies/corun.py",),
    TIED: ("policies/corun.py",),
    "lru": _LRU,
    "chameleon": ("papers/chameleon.py", *_LRU),
    "libra": ("papers/libra.py",),
    "static-split": _BASELINE,
    "discard-idle": _BASELINE,
    "slora": _BASELINE,
}


class KeptCells:
    """Figures of cells in a folder, a file each."""

    def __init__(self, folder: Path, traces: Path | None) -> None:
        self._folder = folder
        of_traces = _traces_digest(traces)
        # Now, before the code that is about to run can change.
        self._digests = {
            policies: hashlib.sha256((code_digest(*policies) + of_traces).encode()).hexdigest()[:16]
            for policies in itertools.product(_OWN, (None, *_OWN_OF_MEMORY))
        }

    def get(self, cell: Cell) -> Figures | None:
        """What was kept of the very same cell; None if nothing was."""
        return read_figures(self._path(cell))

    def put(self, cell: Cell, figures: Figures) -> None:
        """Keep; the file is there whole or not at all."""
        write_figures(self._path(cell), cell, figures)

    def _path(self, cell: Cell) -> Path:
        digest = self._digests[cell.policy, _name_of(cell.memory_policy)]
        return self._folder / f"{cell.name}-{digest}.json"


def read_figures(path: Path) -> Figures | None:
    """What ``write_figures`` wrote; None if it did not."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    except FileNotFoundError:
        return None
    return Figures(**figures)


def write_figures(path: Path, cell: Cell, figures: Figures, slowness: float = 1.0) -> None:
    """Write a file that is there whole or not at all.

    ``slowness``: of the machine beside a real run; see ``replays.real``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"cell": asdict(cell), "figures": asdict(figures), "slowness": slowness}, indent=1)
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def code_digest(policy: str, memory_policy: str | None) -> str:
    """Of all code that decides the cells of these policies."""
    digest = hashlib.sha256()
    for path in deciding_files(policy, memory_policy):
        digest.update(f"{path.name}\n{_code_of(path)}\n".encode())
    return digest.hexdigest()


def deciding_files(policy: str, memory_policy: str | None) -> list[Path]:
    """Their paths, in a fixed order."""
    found = {path for pattern in _DECIDING for path in PRODUCT.glob(pattern)}
    # Without prefixes it is ``lru``, or what drops idle adapters.
    of_memory = _OWN_OF_MEMORY[_name_of(memory_policy) or "lru"]
    for folder, owned, own in (
        ("runtime/scheduler", _OWN, _OWN[policy]),
        ("runtime/memory", _OWN_OF_MEMORY, of_memory),
    ):
        of_all = itertools.chain.from_iterable(owned.values())
        found -= _paths(folder, of_all)
        found |= _paths(folder, own)
    return [*sorted(found), _CELLS]


def _name_of(memory_policy: str | None) -> str | None:
    """Without options."""
    return memory_policy and memory_policy.partition(":")[0]


def _paths(folder: str, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in (PRODUCT / folder).glob(pattern)}


@functools.cache
def _code_of(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
            and isinstance(node.body[0].value, ast.Constant)
        ):
            del node.body[0]
    return ast.dump(tree)


def _traces_digest(traces: Path | None) -> str:
    """Of the files' names and sizes; without traces lengths are of a table in the code."""
    if traces is None:
        return ""
    return repr(sorted((path.name, path.stat().st_size) for path in traces.iterdir()))
