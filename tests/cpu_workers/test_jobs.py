"""Jobs of real workers: ahead of their x, in teams, too many, past the last number, without adapter."""

from collections.abc import Iterator

import pytest
from corun.shm.errors import MailboxFullError
from corun.shm.job import JobStatus
from support.worker_pool import Driver, case, make_config, table_of

DONE = JobStatus.DONE


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """Two workers with few slots, just before their numbers of jobs wrap around."""
    config = make_config(2, delta_table=table_of("numba"), num_job_slots=4, first_sequence=2**31 - 60)
    cases = [case(4), case(9, seed=1), case(32, (1, 64), 2), case(13, (16, 0), 3)]
    with Driver(cases, config) as driver:
        yield driver


def test_jobs_may_be_published_ahead_of_their_x(driver: Driver) -> None:
    # Each has its own rows; in the same rows, x must be ordered behind earlier waits.
    for _ in range(10):
        jobs = [driver.publish(0, number % 2) for number in range(4)]
        for number, job in enumerate(jobs):
            driver.send_x(number % 2, job)
        for number, job in enumerate(jobs):
            assert driver.finish(number % 2, job) is DONE


def test_a_full_mailbox_refuses_and_goes_on(driver: Driver) -> None:
    jobs = [driver.publish(0, 0) for _ in range(4)]
    with pytest.raises(MailboxFullError, match="4 of 4 slots hold"):
        driver.publish(0, 0)
    for job in jobs:
        driver.send_x(0, job)
        assert driver.finish(0, job) is DONE
    assert driver.run(0, 0) is DONE


def test_numbers_of_jobs_wrap_around(driver: Driver) -> None:
    numbers = []
    for _ in range(70):
        job = driver.start(1, 0)
        numbers.append(job.sequence)
        assert driver.finish(0, job) is DONE
    assert numbers[numbers.index(2**31 - 1) + 1] == -(2**31)


def test_how_slow_jobs_are_may_change_between_them(driver: Driver) -> None:
    driver.pool.slowdown = 2.0
    first = driver.start(0, 0)
    driver.pool.slowdown = 1.0
    second = driver.start(0, 0)
    assert (first.slowdown_permille, second.slowdown_permille) == (2000, 1000)
    assert [driver.finish(0, job) for job in (first, second)] == [DONE] * 2


def test_a_job_without_an_adapter_fails_alone(driver: Driver) -> None:
    region, restarts = driver.places[0].region_bytes(), driver.pool.counts().num_restarts
    driver.arena.buffer[:8] = b"nonsense"
    assert driver.run(0, 0) is JobStatus.FAILED
    driver.arena.buffer[: len(region)] = region
    assert driver.run(0, 0) is DONE
    assert driver.pool.counts().num_restarts == restarts


@pytest.mark.parametrize("index", range(4))
def test_every_team_computes_the_same_bits(driver: Driver, index: int) -> None:
    """By one worker, by two that share ranks and columns, and by two that cut the tokens."""
    place = driver.places[index]
    results = []
    for members, token_parts in ((0, 1), ((0, 1), 1), ((1, 0), 1), ((0, 1), 2)):
        assert driver.run(members, index, token_parts=token_parts) is DONE
        results.append(place.y.copy())
    assert all((result == results[0]).all() for result in results)


def test_teams_and_single_workers_side_by_side(driver: Driver) -> None:
    team = (0, 1)
    wanted: list[tuple[int | tuple[int, ...], int]] = [(team, 2), (0, 0), (1, 1), (team, 3)]
    jobs = [driver.publish(members, index) for members, index in wanted]
    for (_, index), job in zip(wanted, jobs, strict=True):
        driver.send_x(index, job)
    for (_, index), job in zip(wanted, jobs, strict=True):
        assert driver.finish(index, job) is DONE
