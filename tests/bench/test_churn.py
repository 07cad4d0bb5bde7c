"""Adapters that are added, changed and removed under load; and the rule for leaks."""

import pytest
from churn import Load, Tally, judge, run


@pytest.mark.full
def test_adapters_come_change_and_go_under_load() -> None:
    """Half a minute of what the benchmark does for five, with fewer adapters."""
    load = Load(adapters=40, seconds=30, clients=4, warm_up_s=15)
    # Captured passes take memory each, and on a busy machine come until the end.
    tally, bounds = run(load, "--decode-graphs", "off")
    assert set(tally.changes) == {"load", "reload", "unload"}
    missed = [name for name, is_met in bounds.items() if not is_met]
    memory_mb = " ".join(f"{value / 1e6:.0f}" for value in tally.samples["memory"])
    assert not missed, (missed, tally.failures[:3], memory_mb)


FLAT = {"memory": 400e6, "shared memory": 5e6, "descriptors": 30.0, "segments": 1.0}
GROWTHS = {"memory": 12e6, "shared memory": 2e6, "descriptors": 3.0, "segments": 1.0}


def tally_of(**growth: float) -> Tally:
    tally = Tally(num_requests=9)
    tally.changes["load"] = 30
    for what, value in FLAT.items():
        more = growth.get(what, 0.0) / 8
        tally.samples[what] = [value + more * number for number in range(10)]
    return tally


@pytest.mark.parametrize("what", GROWTHS)
def test_a_leak_is_seen(what: str) -> None:
    load = Load(seconds=30)
    assert all(judge(load, tally_of()).values())
    bounds = judge(load, tally_of(**{what: GROWTHS[what] * 8 / 6}))
    assert [name for name, is_met in bounds.items() if not is_met] == [f"{what} flat after 60 s"]


@pytest.mark.parametrize("what", GROWTHS)
@pytest.mark.parametrize("sample", [1, 5, 8])
def test_what_is_taken_once_is_no_leak(what: str, sample: int) -> None:
    tally = tally_of()
    tally.samples[what][sample:] = [value + GROWTHS[what] for value in tally.samples[what][sample:]]
    assert all(judge(Load(seconds=30), tally).values())


def test_a_failed_request_and_a_missed_change_are_seen() -> None:
    tally = tally_of()
    tally.failures.append("adapter-0001: 500")
    tally.changes.clear()
    met = list(judge(Load(seconds=30), tally).values())
    assert met == [False, False, True, True, True, True]
