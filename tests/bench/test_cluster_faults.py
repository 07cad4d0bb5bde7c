"""The judging of faults."""

from cluster_faults import BOUNDS, failures_of


def test_what_exceeds_a_bound_or_hit_nobody_is_said() -> None:
    good = dict.fromkeys(BOUNDS["engine-kill"], 0.0) | {"streams cut": 3.0, "streams": 100.0}
    assert failures_of("engine-kill", good) == []
    assert failures_of("engine-kill", good | {"avoided s": 0.6, "silent ends": 1.0}) == [
        "engine-kill: silent ends is 1, at most 0",
        "engine-kill: avoided s is 0.6, at most 0.5",
    ]
    assert failures_of("engine-kill", good | {"streams cut": 0.0}) == [
        "engine-kill: streams cut is 0, at least 1"
    ]
