"""Imports numba without scipy, which is a third of a worker's start and which no kernel uses."""

import sys


def import_numba() -> None:
    """Import numba as if scipy were not installed: its kernels then have no linear algebra.

    For corun's own processes. Has no effect if one of the two is already imported.
    """
    if "numba" in sys.modules or "scipy" in sys.modules:
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import numba.np.arraymath  # noqa: F401  # which looks for scipy
    finally:
        del sys.modules["scipy"]
