"""Verdicts of the questions to a GPU follow from their figures."""

from typing import Any

import pytest
from gpu_checks.verdicts import verdict_of


def _case(**changes: Any) -> dict[str, Any]:
    return {"wrong_words": 8, "planted": 8, **changes}


def _ordered(**changes: Any) -> dict[str, Any]:
    ways = {"to_worker": _case(), "to_device_zero_copy": _case(), "to_device_by_copy": _case()}
    return {
        "rounds_wanted": 100,
        "so_far": {"rounds": 100, "gib_each_way": 1.0, **ways, **changes},
    }


_QUEUE = {
    "calls_before_one_blocked": 1023,
    "tried": 8192,
    "blocked_ms": 1900.0,
    "longest_pause_of_another_thread_ms": 1.2,
}
_QUEUES = {"launch queue": _QUEUE, "record queue": _QUEUE}
_HELD = {**_QUEUE, "longest_pause_of_another_thread_ms": 1899.0}
_LOST = {
    "was_held": True, "worker_is_gone": True, "device_computes": True,
    "supervisor_exit_code": 0, "recovered_ms": 9.0,
}  # fmt: skip
_RECOVERED = {
    "worker killed": _LOST, "worker stopped": _LOST, "segments_left": [], "descriptors_left": 0,
    "waiter killed": {"processes_gone_ms": 3.0},
}  # fmt: skip
_REPLAYED = {
    "captured": True, "replays": 9, "us_per_replay": 5.0, "wrong_words_to_worker": 0,
    "wrong_words_to_device": 0, "rounds_counted_by_device": 9,
}  # fmt: skip
_REGISTERED = {"registered": True, "is_pinned": True, "was_queued": True, "copy_call_us": 9.0}
_READ = {"accepted": True, "found": 5, "planted": 5, "stale_words": 0, "num_launches": 7}


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        ("4", _ordered(), "every payload was there before its flag"),
        ("4", _ordered(to_worker=_case(wrong_words=9)), "1 wrong words to_worker"),
        ("4", _ordered(to_worker=_case(wrong_words=7)), "the check is blind"),
        ("4", _ordered(rounds=60), "fewer than 100 rounds"),
        ("5", {**_QUEUES, "a": {"went_on": True}}, "went on: a; stood still or failed: nothing"),
        ("5", {**_QUEUES, "a": {"went_on": True}}, "lock free; record 1024 blocked for 1900.0 ms"),
        (
            "5",
            {**_QUEUES, "launch queue": _HELD, "a": {"went_on": False}},
            "stood still or failed: a; launch 1024 blocked for 1900.0 ms with Python's lock HELD",
        ),
        (
            "5",
            {**_QUEUES, "record queue": {**_QUEUE, "calls_before_one_blocked": None}},
            "8192 times record did not fill the queue",
        ),
        ("6", _RECOVERED, "left behind: nothing"),
        ("6", {**_RECOVERED, "segments_left": ["corun-1"]}, "left behind: corun-1"),
        (
            "6",
            {**_RECOVERED, "worker killed": {**_LOST, "device_computes": False}},
            "worker killed: NOT properly recovered",
        ),
        ("7", _REPLAYED, "0 wrong words"),
        ("7", {**_REPLAYED, "rounds_counted_by_device": 8}, "did not run every replay"),
        ("7", {"captured": False, "error": "not permitted"}, "not captured: not permitted"),
        ("1", {"may_lock_without_limit": False, "memfd": _REGISTERED}, "are asynchronous"),
        (
            "1",
            {"may_lock_without_limit": True, "memfd": {**_REGISTERED, "copy_call_us": 900.0}},
            "NOT asynchronous",
        ),
        (
            "1",
            {"may_lock_without_limit": False, "memfd": {"registered": False}},
            "memfd: refused",
        ),
        ("8", {"tensor": _READ}, "by tensor: 0 stale words in 7 launches"),
        ("8", {"tensor": {**_READ, "found": 0}}, "blind"),
        ("8", {"tensor": {"accepted": False}}, "not accepted"),
        (
            "2",
            {
                "num_rounds": 3,
                "wrong_words": {"copy_to_device": 4, "copy_to_host": 0},
                "planted_words": {"planted": 1, "found": 1},
                "device_address_is_host_address": False,
            },
            "wrong words {'copy_to_device': 4} over 3 rounds, device addresses are NOT the host's",
        ),
        ("3", {"worker_words": "compiled"}, "no verdict, 'on an idle link' was not measured"),
    ],
)
def test_verdicts_follow_from_the_figures(name: str, found: dict[str, Any], expected: str) -> None:
    verdict = verdict_of(name, {"triton": found}, {"triton": "answered"})
    assert expected in verdict
    assert verdict.startswith("triton: ")
    assert "(timed-out)" in verdict_of(name, {"triton": found}, {"triton": "timed-out"})
