"""Requests of gateways that a state includes: each once, in any order, and within bounds."""

import random

import pytest
from corun.runtime.engine_state import Accepted
from corun.runtime.server.errors import HttpError
from corun.runtime.server.open_requests import GatewayLedger, GatewayRequest


def opened(ledger: GatewayLedger, text: str) -> GatewayRequest:
    request = ledger.open([(b"host", b"x"), (b"x-corun-gateway", text.encode())])
    assert request is not None
    return request


def answer(ledger: GatewayLedger, *texts: str) -> None:
    for text in texts:
        opened(ledger, text).ended()


def test_others_have_no_number() -> None:
    ledger = GatewayLedger()
    assert ledger.open([(b"host", b"x")]) is None
    assert ledger.accept_known(100) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g",
        "g:",
        ":1",
        "g:0",
        "g:01",
        "g:-1",
        "g:1.5",
        "g:1,g:2",
        "g g:1",
        "ü:1",
        "g:1" + "0" * 15,
        "x" * 65 + ":1",
    ],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(HttpError, match="must be ID:N") as caught:
        opened(GatewayLedger(), text)
    assert caught.value.status == 400


def test_a_request_is_in_the_state_that_knows_its_engine_requests() -> None:
    ledger = GatewayLedger()
    opened(ledger, "g:1").expects(["a"])
    ledger.sent("a", 4)
    ledger.sent("not of a gateway", 4)
    assert ledger.accept_known(3) == {}
    changes = ledger.num_changes
    assert ledger.accept_known(4) == {"g": Accepted(last=1)}
    assert ledger.num_changes == changes + 1
    ledger.accept_known(5)
    assert ledger.num_changes == changes + 1


def test_all_prompts_must_have_been_sent() -> None:
    ledger = GatewayLedger()
    opened(ledger, "g:1").expects(["a-0", "a-1"])
    ledger.sent("a-1", 1)
    assert ledger.accept_known(10) == {}
    ledger.sent("a-0", 2)
    assert ledger.accept_known(10) == {"g": Accepted(last=1)}


def test_what_was_answered_is_not_waited_for() -> None:
    ledger = GatewayLedger()
    answer(ledger, "g:1")  # refused before it was sent to the engine
    request = opened(ledger, "g:2")
    request.expects(["a", "b"])
    ledger.sent("a", 9)
    request.ended()
    ledger.sent("b", 9)  # too late
    assert ledger.accept_known(0) == {"g": Accepted(last=2)}
    assert ledger.accept_known(9) == {"g": Accepted(last=2)}


def test_requests_may_come_in_any_order() -> None:
    ledger = GatewayLedger()
    answer(ledger, "a:3", "a:5", "b:1")
    accepted = {"a": Accepted(last=5, missing=(1, 2, 4)), "b": Accepted(last=1)}
    assert ledger.accept_known(0) == accepted
    answer(ledger, "a:2", "a:4")
    assert ledger.accept_known(0)["a"] == Accepted(last=5, missing=(1,))
    changes = ledger.num_changes
    answer(ledger, "a:4")
    assert ledger.num_changes == changes


def test_what_is_long_ago_is_taken_to_be_in_it() -> None:
    ledger = GatewayLedger()
    rng = random.Random(0)
    numbers = [*range(1, 5001)]
    lost = {rng.choice(numbers) for _ in range(500)} | {4999}
    for number in numbers:
        if number not in lost:
            answer(ledger, f"g:{number}")
        (accepted,) = ledger.accept_known(0).values() or (Accepted(last=0),)
        assert set(accepted.missing) <= lost
        assert len(accepted.missing) <= 1024
        assert all(accepted.last - 1025 < one < accepted.last for one in accepted.missing)
    assert accepted.missing == tuple(sorted(one for one in lost if one >= 5000 - 1024))
    answer(ledger, f"g:{10**14}")
    (accepted,) = ledger.accept_known(0).values()
    assert len(accepted.missing) == 1024


def test_the_gateway_that_is_silent_the_longest_is_forgotten() -> None:
    ledger = GatewayLedger()
    answer(ledger, *(f"g{index}:1" for index in range(64)), "g0:2", "new:1")
    accepted = ledger.accept_known(0)
    assert len(accepted) == 64
    assert "g1" not in accepted
    assert accepted["g0"].last == 2
