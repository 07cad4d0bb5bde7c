"""When an engine is ejected, and when it is back."""

from corun.runtime.cluster.gateway.health import EXITED, SILENT, EngineHealth


def _silent(health: EngineHealth, duration_s: float) -> bool:
    """Advance in steps of 0.1 s; return whether the engine is to be ejected at the end."""
    return [health.advance(0.1) for _ in range(round(10 * duration_s))][-1]


def test_the_first_heartbeat_lets_an_engine_in() -> None:
    health = EngineHealth()
    assert health.ejected_for is not None
    assert health.on_heartbeat(7) and health.ejected_for is None
    assert not health.on_heartbeat(8)


def test_a_heartbeat_that_does_not_grow_is_silence() -> None:
    health = EngineHealth()
    health.on_heartbeat(1)
    assert not _silent(health, 1.9)
    health.on_heartbeat(2)
    assert not _silent(health, 1.0)
    assert not health.on_heartbeat(2) and not _silent(health, 0.9)
    assert _silent(health, 0.1) and round(health.silent_s, 3) == 2.0
    assert health.eject(SILENT) and not health.eject(EXITED)
    assert health.ejected_for == SILENT
    assert not _silent(health, 5.0)  # already ejected


def test_time_in_which_the_gateway_was_late_itself_is_no_silence() -> None:
    health = EngineHealth()
    health.on_heartbeat(1)
    assert not health.advance(60.0)
    assert not _silent(health, 1.7) and _silent(health, 0.1)


def test_three_heartbeats_bring_it_back() -> None:
    health = EngineHealth()
    health.on_heartbeat(1)
    health.eject(SILENT)
    assert not health.on_heartbeat(2) and not health.on_heartbeat(2) and not health.on_heartbeat(3)
    health.eject(EXITED)  # ejected again: the count starts over
    assert not health.on_heartbeat(4) and not health.on_heartbeat(5)
    assert health.on_heartbeat(6) and health.ejected_for is None
