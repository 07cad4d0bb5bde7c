"""Hostile structured output beside streams: refused in time, and nothing is left of it."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
from corun.runtime.sampling import StructuredOutput
from support.attacked import Attacked, Rows, streams_on
from support.hostile_structures import HOSTILE, regex, slow
from support.serving import Served

pytestmark = pytest.mark.faults

COMPLETIONS = "/v1/completions"
FIELDS = {"json_schema": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}


@pytest.fixture(scope="module")
def attacked(rows: Rows) -> Iterator[Attacked]:
    with (
        Served("--device", "cpu", "--memory-gib", "0.25") as served,
        streams_on(served, rows) as under_attack,
    ):
        send(served, regex("[a-z]"))  # starts the process that tries structures
        yield under_attack


def body_of(structured: StructuredOutput) -> bytes:
    field = FIELDS[structured.kind]
    return json.dumps({"prompt": "hi", "max_tokens": 4, field: structured.text}).encode()


def send(served: Served, structured: StructuredOutput) -> int:
    headers = {"content-type": "application/json"}
    url, body = served.url + COMPLETIONS, body_of(structured)
    return httpx.post(url, content=body, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_structure(attacked: Attacked, name: str) -> None:
    def attack() -> str:
        began_s = time.monotonic()
        status = send(attacked.served, HOSTILE[name])
        took_s = time.monotonic() - began_s
        assert status in (400, 429)  # 429: another process of the machine took the time
        return f"{status} in {took_s:.1f} s"

    attacked.check(f"structure: {name}", attack)


def test_clients_that_leave_hold_up_no_other(attacked: Attacked) -> None:
    host, _, port = attacked.served.url.removeprefix("http://").partition(":")
    server = psutil.Process(attacked.served.process.pid)
    num_processes = len(server.children(recursive=True))

    def attack() -> str:
        for number in range(20):
            body = body_of(slow(number))
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(head.encode() + body)
        began_s = time.monotonic()
        status = send(attacked.served, regex("[a-z]+"))
        assert status == 200
        took_s = time.monotonic() - began_s
        assert took_s < 5, "it waited for structures whose clients have left"
        return f"{status} in {took_s:.1f} s"

    attacked.check("20 structures, clients left", attack)
    assert len(server.children(recursive=True)) == num_processes
