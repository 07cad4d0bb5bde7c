"""The result of a pass: void deltas after failures of workers or streams, and the next pass."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corun.gpu.coexec.assistant import Assistant, AssistedPass, ColdRow
from corun.gpu.coexec.handover import Exchange
from corun.gpu.device.base import DeviceError, DeviceTimeoutError, Stream
from corun.shm.errors import WaitTimeoutError
from support.streams.symbolic_tensors import as_torch

COMPUTE, TRANSFER = Stream(0, "compute"), Stream(1, "exchange")
ASSISTED, PIPELINED, WARM = (0, 8), (8, 12), (12, 16)  # spans of the rows of every pass


@dataclass
class Failing:
    """Streams with at most one failure each, and workers that may give no results."""

    failures: dict[Stream, DeviceError] = field(default_factory=dict)
    void: frozenset[tuple[int, int]] = frozenset()
    is_late: bool = False
    num_ready_workers: int = 1
    readings: list[bool] = field(default_factory=list)  # of the passes: whether files are being read

    def synchronize(self, stream: Stream, *, timeout_s: float) -> None:
        if stream in self.failures:
            raise self.failures.pop(stream)

    def invoke(self, rows: Any, *, is_reading: bool) -> Any:
        self.readings.append(is_reading)
        return {(0, 0): (SimpleNamespace(start=ASSISTED[0], end=ASSISTED[1]),)}

    def collect(self, invocations: Any, *, timeout_s: float) -> frozenset[tuple[int, int]]:
        if self.is_late:
            raise WaitTimeoutError("no results")
        return self.void


def begin(failing: Failing, num_on_host: int = 1) -> AssistedPass:
    """A pass of one layer; ``num_on_host``: of the adapters' layers."""
    exchange = Exchange(as_torch(failing), COMPUTE, TRANSFER)
    handover = as_torch(SimpleNamespace(exchange=exchange))
    assistant = Assistant(handover, as_torch(None), as_torch(failing), num_layers=1)
    arriving: Any = SimpleNamespace(
        begin_pass=lambda: num_on_host, arrival=lambda layer: None, await_read=lambda layer: None
    )
    rows = [
        ColdRow(*ASSISTED, 1, 0, 8, arriving),
        ColdRow(*PIPELINED, 0, 1, 8, arriving),
        ColdRow(*WARM, 0, 2, 8, None),
    ]
    return assistant.begin(rows, torch.device("cpu"))


def test_a_pass_without_a_failure_is_void_where_workers_failed() -> None:
    assert begin(Failing()).finish() == frozenset()
    assert begin(Failing(void=frozenset({ASSISTED}))).finish() == {ASSISTED}
    assert begin(Failing(is_late=True)).finish() == {ASSISTED}


def test_the_gateway_hears_whether_files_are_being_read() -> None:
    failing = Failing()
    for num_on_host in (1, 0):
        begin(failing, num_on_host).finish()
    assert failing.readings == [False, True]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("streams", [(COMPUTE,), (TRANSFER,), (COMPUTE, TRANSFER)])
@pytest.mark.parametrize("kind", [DeviceError, DeviceTimeoutError])
def test_a_failed_stream_voids_all_cold_rows_of_its_pass_and_of_no_other(
    streams: tuple[Stream, ...], kind: type[DeviceError], is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing({stream: kind(f"stream {stream.name}") for stream in streams}, is_late=is_late)
    assert begin(failing).finish() == {ASSISTED, PIPELINED}
    assert f"stream {streams[-1].name}" in caplog.text  # of the exchange, if both did
    failing.is_late = False
    assert begin(failing).finish() == frozenset()
