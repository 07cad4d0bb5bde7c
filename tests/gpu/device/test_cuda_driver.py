"""The calls of the driver's bindings, and errors without usable bindings."""

import builtins
import inspect
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_driver import BINDINGS_NEEDED, BindingsDriver, DriverError, load_driver


def _bindings() -> Any:
    return pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("cuDriverGetVersion", []),
        ("cuMemHostRegister", ["p", "bytesize", "Flags"]),
        ("cuMemHostUnregister", ["p"]),
        ("cuMemHostGetDevicePointer", ["p", "Flags"]),
        ("cuStreamWriteValue32", ["stream", "addr", "value", "flags"]),
        ("cuStreamWaitValue32", ["stream", "addr", "value", "flags"]),
    ],
)
def test_bindings_take_what_we_pass(call: str, parameters: list[str]) -> None:
    """The names are in the first line of the generated documentation."""
    signature = (inspect.getdoc(getattr(_bindings(), call)) or "").splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    names = [part.split(":")[0].split()[-1] for part in inside.split(",") if part.strip()]
    assert names == parameters


def test_bindings_name_the_values_that_we_use() -> None:
    bindings = _bindings()
    assert int(bindings.CU_MEMHOSTREGISTER_PORTABLE) == 1
    assert int(bindings.CU_MEMHOSTREGISTER_DEVICEMAP) == 2
    assert int(bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT) == 0
    assert int(bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == 0
    assert int(bindings.CUresult.CUDA_SUCCESS) == 0
    assert int(bindings.CUstream(12345)) == 12345
    assert int(bindings.cuuint32_t(2**32 - 1)) == 2**32 - 1, "values are passed unsigned"


def test_driver_is_missing_with_a_reason() -> None:
    _bindings()
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match="no CUDA driver"):
        load_driver()


def _raise_missing(package: str) -> str:
    raise metadata.PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (_raise_missing, "cuda-bindings is not installed; 12.9 or newer is needed: pip install"),
        (lambda _: "12.8.0", "cuda-bindings 12.8.0 is too old; 12.9 or newer is needed"),
    ],
)
def test_bindings_that_are_missing_or_old_are_named(
    version: Callable[[str], str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(DeviceError, match=f"^{message}.*'cuda-bindings>=12.9'"):
        load_driver()


def test_bindings_that_cannot_be_imported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("undefined symbol")
        return real_import(name, *arguments)

    monkeypatch.setattr(metadata, "version", lambda _: "13.0.1")
    monkeypatch.setattr(builtins, "__import__", refuse)
    message = "cuda-bindings 13.0.1 cannot be imported: undefined symbol; 12.9 or newer is needed"
    with pytest.raises(DeviceError, match=message):
        load_driver()


def test_the_package_asks_for_the_bindings_that_are_needed(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = "cuda-bindings>=" + ".".join(map(str, BINDINGS_NEEDED))
    assert wanted in project["optional-dependencies"]["gpu"]


class FakeBindings:
    """Returns one code from every call, and records the arguments."""

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUstream = int

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[int, int]:
            self.calls.append((name, *arguments))
            return self.code, 7

        return call


def test_driver_passes_addresses_values_and_flags() -> None:
    bindings = FakeBindings()
    driver = BindingsDriver(bindings)
    driver.register(4096, 8192)
    assert driver.device_address(4096) == 7
    driver.write_value(5, 4100, -1)
    driver.wait_value(5, 4100, 2**32 + 3)
    driver.unregister(4096)
    assert driver.version() == 7
    assert bindings.calls == [
        ("cuMemHostRegister", 4096, 8192, 3),
        ("cuMemHostGetDevicePointer", 4096, 0),
        ("cuStreamWriteValue32", 5, 4100, 2**32 - 1, 0),
        ("cuStreamWaitValue32", 5, 4100, 3, 0),
        ("cuMemHostUnregister", 4096),
        ("cuDriverGetVersion",),
    ]


def test_driver_turns_codes_into_errors_that_name_the_call() -> None:
    with pytest.raises(DriverError, match=r"cuMemHostRegister returned .* \(801\)") as raised:
        BindingsDriver(FakeBindings(801)).register(4096, 4096)
    assert (raised.value.call, raised.value.result) == ("cuMemHostRegister", 801)
