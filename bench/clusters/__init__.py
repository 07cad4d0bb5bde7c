"""Shared parts of benchmarks of clusters. Their fake engines are those of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
