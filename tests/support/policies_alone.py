"""Cold requests are admitted and planned in a process that has no mechanism to ask.

``run`` is called in a fresh process. Only the executor's side of the conversation is made up: its
results, as plain data.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_ABSENT = ("corun.gpu", "corun.cpu_workers", "corun.shm", "torch", "numba", "transformers")
# What the policy may import of these: pure, and held by ``tests/house``.
_PURE = (
    "corun.shm",
    "corun.shm.arena_ranges",
    "corun.shm.errors",
    "corun.shm.region",
    "corun.cpu_workers",
    "corun.cpu_workers.teams",
)


class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        packages = {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
        if packages & set(_ABSENT) and name not in _PURE:
            raise ModuleNotFoundError(f"{name} is mechanism", name=name)
        return None


def run() -> None:
    """Raise if a policy needs mechanism."""
    sys.meta_path.insert(0, _Absent())
    from support.cold_policies import simulate_requests, start_cold_requests

    start_cold_requests()
    simulate_requests()
    imported = {name for name in sys.modules if name.startswith(_ABSENT)}
    assert imported <= set(_PURE), imported
