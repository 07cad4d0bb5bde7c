"""The parts of ``cluster.py``: a cheap engine, cheap clients, and verdicts."""

import json
import os
from typing import Any

import pytest
from gateway.first_figures import rate_of
from gateway.plain_client import Asker, Loop, request_bytes, throughput
from gateway.rig import get, plain_engines

_ENDS = b"0\r\n\r\n"


def test_a_plain_engine_answers_at_once_and_then_in_steps() -> None:
    with plain_engines(1, sorted(os.sched_getaffinity(0)), 0.05) as (url,):
        address = "127.0.0.1", int(url.rpartition(":")[2])
        asker = Asker(address)
        assert min(asker.first_byte_s() for _ in range(5)) < 0.05
        asker.close()
        asked = request_bytes(stream=True, max_tokens=4)
        requests, tokens = throughput(address, asked, _ENDS, num_connections=8, measured_s=1.0)
        # Three steps for each request, and four tokens.
        assert 0 < requests <= 8 / 0.15 * 1.2
        assert tokens == pytest.approx(4 * requests, abs=4 * 8)
        assert json.loads(get(url, "/v1/models"))["data"][0]["id"] == "plain"


def test_tokens_are_counted_once_however_they_come() -> None:
    class Transport:
        num_written = 0

        def write(self, data: bytes) -> None:
            self.num_written += 1

    stream = b"".join(b'10\r\ndata: {"a":%d}\n\n\r\n' % number for number in range(10))
    stream += b"e\r\ndata: [DONE]\n\n\r\n" + _ENDS
    for size in (1, 3, 7, 19, len(stream)):
        loop, transport = Loop(b"again", _ENDS), Transport()
        made: Any = transport
        loop.connection_made(made)
        for start in range(0, len(stream), size):
            loop.data_received(stream[start : start + size])
        assert (loop.num_tokens, loop.num_requests, transport.num_written) == (10, 1, 2), size


@pytest.mark.parametrize(
    ("value", "busy", "verdict"), [(1200.0, 0.5, True), (900.0, 0.5, False), (900.0, 0.95, False)]
)
def test_a_rate_that_is_missed_is_missed_however_busy_the_gateway_was(
    value: float, busy: float, verdict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    class Cluster:
        @property
        def gateway_cpu_s(self) -> float:
            return busy * now_s[0]

    def measure() -> float:
        now_s[0] += 1.0
        return value

    monkeypatch.setattr("gateway.first_figures.time.monotonic", lambda: now_s[0])
    cluster: Any = Cluster()
    figures, found = rate_of(cluster, measure, 1000.0)
    assert found is verdict
    assert figures["gateway busy"] == busy
