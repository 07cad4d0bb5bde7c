"""``import corun``: cheap, lazy, and complete."""

import subprocess
import sys

import corun
import pytest
from corun.runtime import errors
from corun.runtime.adapters.resolve import ResolveError

HEAVY = {"torch", "transformers", "numpy", "msgspec", "asyncio", "tokenizers", "numba"}


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_importing_loads_nothing_heavy() -> None:
    loaded = run_python("import corun, sys; print(*sys.modules)").split()
    assert HEAVY.isdisjoint(loaded)
    assert [name for name in loaded if name.startswith("corun")] == ["corun"]


def test_public_classes_come_without_torch() -> None:
    code = "import sys\nfrom corun import *\nprint(Engine.__name__, 'torch' in sys.modules)"
    assert run_python(code) == "Engine False"


def test_all_names_are_there() -> None:
    for name in corun.__all__:
        assert getattr(corun, name) is not None
    assert set(corun.__all__) <= set(dir(corun))


def test_every_error_is_public() -> None:
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.CorunError)
    }
    assert names <= set(corun.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        corun.Enigne  # noqa: B018


def test_errors_travel_between_processes_by_name() -> None:
    for kind, expected in (("AdapterError", errors.AdapterError), ("OSError", errors.ModelError)):
        error = errors.rebuild_error(kind, "text", default=errors.ModelError)
        assert type(error) is expected
        assert "text" in str(error)
    refused = ResolveError(["bad name"])
    error = errors.rebuild_error(refused.kind, str(refused), default=errors.StepFailedError)
    assert type(error) is errors.AdapterError
    assert str(error) == str(refused)
