"""The requests that the slow log explains, and its lines."""

import pytest
from corun.runtime.engine.core import SlowLog
from corun.runtime.engine.messages import AddRequest
from corun.runtime.plan import RequestId
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import FinishReason, RequestUpdate, TimePart, TimeParts


def waited(seconds: float) -> TimeParts:
    return TimeParts({TimePart.KV_MEMORY: seconds}, {TimePart.KV_MEMORY: 41}, 9)


def asked(request_id: int, name: str = "", adapter_name: str | None = None) -> AddRequest:
    return AddRequest(request_id, (1,), SamplingParams(), adapter_name, name=name)


def test_who_is_slow_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    log = SlowLog(1.5)
    log.begin(asked(1, "cmpl-1", "tails"))
    log.begin(asked(2))
    log.begin(asked(3))
    log.record(RequestUpdate(RequestId(1), (7,), timing=waited(1.8)))
    log.record(RequestUpdate(RequestId(1), (8,), finish_reason=FinishReason.LENGTH))
    log.record(RequestUpdate(RequestId(2), (7,), timing=waited(1.5)))
    log.record(RequestUpdate(RequestId(3), finish_reason=FinishReason.ABORT, timing=waited(30.0)))
    assert caplog.messages == [
        "request cmpl-1 for tails had its first token after 1.8 s: "
        "waited 1.8 s for KV memory, which 41 running requests held",
        "request 3 for the base model ended (abort) after 30 s: "
        "waited 30 s for KV memory, which 41 running requests held",
    ]


def test_nobody_is_explained_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    log = SlowLog(None)
    log.begin(asked(1))
    log.record(RequestUpdate(RequestId(1), (7,), timing=waited(1000.0)))
    assert not caplog.messages
