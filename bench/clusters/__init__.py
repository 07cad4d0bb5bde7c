"""What benchmarks of clusters share. Their stand-ins for engines are those of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
