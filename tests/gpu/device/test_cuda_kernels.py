"""The word kernels, interpreted and compiled, and the calls that the driver's bindings offer."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
from corun.gpu.device.base import DeviceError
from corun.gpu.device.cuda_driver import BindingsDriver, DriverError, load_driver
from support.triton_program import run_triton_program


def test_kernels_store_and_wait_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_triton_program("triton_words", "interpret", TRITON_INTERPRET="1")


def test_kernels_compile_to_fenced_accesses_at_system_scope() -> None:
    pytest.importorskip("triton")
    printed = json.loads(run_triton_program("triton_words", "compile"))
    assert printed, "at least the variant for older Triton"
    for name, assembly in printed.items():
        if name.startswith("signal_kernel"):
            assert "st.release.sys" in assembly or "fence.release.sys" in assembly, name
            assert "atom." not in assembly, f"{name}: no atomic operation over the link"
        else:
            assert "ld.volatile" in assembly or "ld.relaxed.sys" in assembly, name
            assert "fence.acq_rel.sys" in assembly or "fence.acquire.sys" in assembly, name


def _bindings() -> Any:
    return pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize(
    ("call", "parameters"),
    [
        ("cuDriverGetVersion", []),
        ("cuDeviceGet", ["ordinal"]),
        ("cuDeviceGetAttribute", ["attrib", "dev"]),
        ("cuMemHostRegister", ["p", "bytesize", "Flags"]),
        ("cuMemHostUnregister", ["p"]),
        ("cuMemHostGetDevicePointer", ["p", "Flags"]),
        ("cuStreamWriteValue32", ["stream", "addr", "value", "flags"]),
        ("cuStreamWaitValue32", ["stream", "addr", "value", "flags"]),
    ],
)
def test_bindings_take_what_we_pass(call: str, parameters: list[str]) -> None:
    """The names are in the first line of the documentation, which the generator writes."""
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
    attribute = bindings.CUdevice_attribute
    assert int(attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) == 91
    assert int(bindings.CUstream(12345)) == 12345
    assert int(bindings.cuuint32_t(2**32 - 1)) == 2**32 - 1, "values are passed unsigned"


def test_driver_is_missing_with_a_reason() -> None:
    _bindings()
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match="no CUDA driver"):
        load_driver()


class FakeBindings:
    """Returns one code from every call, and remembers the arguments."""

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM=91
    )
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
    assert driver.can_use_host_pointers(0)
    assert bindings.calls == [
        ("cuMemHostRegister", 4096, 8192, 3),
        ("cuMemHostGetDevicePointer", 4096, 0),
        ("cuStreamWriteValue32", 5, 4100, 2**32 - 1, 0),
        ("cuStreamWaitValue32", 5, 4100, 3, 0),
        ("cuMemHostUnregister", 4096),
        ("cuDriverGetVersion",),
        ("cuDeviceGet", 0),
        ("cuDeviceGetAttribute", 91, 7),
    ]


def test_driver_turns_codes_into_errors_that_name_the_call() -> None:
    with pytest.raises(DriverError, match=r"cuMemHostRegister returned .* \(801\)") as raised:
        BindingsDriver(FakeBindings(801)).register(4096, 4096)
    assert (raised.value.call, raised.value.code) == ("cuMemHostRegister", 801)
