"""When an engine is ejected, and when it is back."""

from corun.runtime.cluster.gateway.health import EXITED, SILENT, EngineHealth


def _silent(health: EngineHealth, duration_s: float) -> bool:
    """A tenth of a second after the other; whether it is to be ejected in the end."""
    return [health.wait(0.1) for _ in range(round(10 * duration_s))][-1]


def test_the_first_beat_lets_an_engine_in() -> None:
    health = EngineHealth()
    assert health.ejected_for is not None
    assert health.beat(7) and health.ejected_for is None
    assert not health.beat(8)


def test_a_beat_that_does_not_grow_is_silence() -> None:
    health = EngineHealth()
    health.beat(1)
    assert not _silent(health, 1.9)
    health.beat(2)
    assert not _silent(health, 1.0)
    assert not health.beat(2) and not _silent(health, 0.9)
    assert _silent(health, 0.1) and round(health.silent_s, 3) == 2.0
    assert health.eject(SILENT) and not health.eject(EXITED)
    assert health.ejected_for == SILENT
    assert not _silent(health, 5.0)  # it is out already


def test_who_was_late_itself_has_not_listened() -> None:
    health = EngineHealth()
    health.beat(1)
    assert not health.wait(60.0)
    assert not _silent(health, 1.7) and _silent(health, 0.1)


def test_three_beats_bring_it_back() -> None:
    health = EngineHealth()
    health.beat(1)
    health.eject(SILENT)
    assert not health.beat(2) and not health.beat(2) and not health.beat(3)
    health.eject(EXITED)  # once more: it begins anew
    assert not health.beat(4) and not health.beat(5)
    assert health.beat(6) and health.ejected_for is None
