"""Errors that end an engine: those that CUDA repeats for every later call."""

from types import SimpleNamespace

import pytest
import torch
from corun.gpu.device.base import DeviceError
from corun.gpu.device.lost import STICKY_CODES, raise_if_lost
from corun.runtime.errors import EngineDeadError
from support.cuda.errors import accelerator_error


@pytest.mark.parametrize("code", STICKY_CODES)
def test_a_sticky_error_is_the_engines_end_by_its_code(code: int) -> None:
    error = accelerator_error(code)
    with pytest.raises(EngineDeadError, match=rf"lost .* \(CUDA error {code}\)") as end:
        raise_if_lost(error)
    assert end.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error(2),  # out of memory
        accelerator_error(1),  # an invalid value
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("an illegal memory access was encountered"),  # only a text: not certain
        DeviceError("a word did not come"),
        MemoryError(),
        KeyError(700),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    raise_if_lost(error)


def test_what_led_to_an_error_counts() -> None:
    def wrapped() -> None:
        try:
            raise accelerator_error(700)
        except torch.AcceleratorError as error:
            raise DeviceError("the CUDA device failed") from error

    def on_the_way() -> None:
        try:
            wrapped()
        finally:
            raise KeyError("what gave up")

    for fail in (wrapped, on_the_way):
        with pytest.raises((DeviceError, KeyError)) as failure:
            fail()
        with pytest.raises(EngineDeadError, match="an illegal address"):
            raise_if_lost(failure.value)


@pytest.mark.parametrize("code", [None, 2, 719])
def test_where_a_text_is_all_there_is_the_device_is_asked(
    code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query() -> bool:
        if code is not None:
            raise accelerator_error(code)
        return True

    def ask() -> SimpleNamespace:
        return SimpleNamespace(query=query)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", ask)
    error = RuntimeError("Triton Error [CUDA]: unspecified launch failure")
    if code != 719:
        raise_if_lost(error)
        return
    with pytest.raises(EngineDeadError, match=r"719.*Triton Error"):
        raise_if_lost(error)
