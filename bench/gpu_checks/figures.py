"""What a question has found so far, in a file: a killed question leaves its figures."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Figures:
    """A dictionary by name, written anew with every figure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Keep a figure, and show it."""
        self.values[name] = value
        self._save(name, value)

    def add(self, name: str, value: Any) -> None:
        """Append to a list of figures, and show what is new."""
        self.values.setdefault(name, []).append(value)
        self._save(name, value)

    def _save(self, name: str, value: Any) -> None:
        print(f"    {name}: {json.dumps(value)}", flush=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.values), encoding="utf-8")
        os.replace(part, self._path)


def read_figures(path: Path) -> dict[str, Any]:
    """What a question left; empty if it left nothing."""
    if not path.exists():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, largest, and how many there were."""
    array = np.asarray(values, dtype=float)
    return {
        "p50": round(float(np.percentile(array, 50)), 3),
        "p99": round(float(np.percentile(array, 99)), 3),
        "max": round(float(array.max()), 3),
        "num": array.size,
    }
