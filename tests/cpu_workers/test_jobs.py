"""Jobs of real workers: ahead of their x, too many, past the last number, without an adapter."""

from collections.abc import Iterator

import pytest
from corun.shm.errors import MailboxFullError
from corun.shm.job import JobStatus
from support.worker_pool import Driver, case, make_config

DONE = JobStatus.DONE


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """Two workers with few slots, just before their numbers of jobs wrap around."""
    config = make_config(2, num_ring_slots=4, num_job_slots=4, first_sequence=2**31 - 10)
    with Driver([case(4), case(9, seed=1)], config) as driver:
        yield driver


def test_jobs_may_be_published_ahead_of_their_x(driver: Driver) -> None:
    # As many as the rings hold: with more, copies must be ordered behind earlier waits.
    for _ in range(10):
        jobs = [driver.publish(0, number % 2) for number in range(4)]
        for number, job in enumerate(jobs):
            driver.send_x(0, number % 2, job)
        for number, job in enumerate(jobs):
            assert driver.finish(0, number % 2, job) is DONE


def test_a_full_mailbox_refuses_and_goes_on(driver: Driver) -> None:
    jobs = [driver.publish(0, 0) for _ in range(4)]
    with pytest.raises(MailboxFullError, match="4 of 4 slots of worker 0"):
        driver.publish(0, 0)
    for job in jobs:
        driver.send_x(0, 0, job)
        assert driver.finish(0, 0, job) is DONE
    assert driver.run(0, 0) is DONE


def test_numbers_of_jobs_wrap_around(driver: Driver) -> None:
    numbers = []
    for _ in range(20):
        job = driver.start(1, 0)
        numbers.append(job.sequence)
        assert driver.finish(1, 0, job) is DONE
    assert numbers[9:11] == [2**31 - 1, -(2**31)]


def test_a_job_without_an_adapter_fails_alone(driver: Driver) -> None:
    region = driver.places[0].region_bytes()
    driver.arena.buffer[:8] = b"nonsense"
    assert driver.run(0, 0) is JobStatus.FAILED
    driver.arena.buffer[: len(region)] = region
    assert driver.run(0, 0) is DONE
    assert driver.pool.counts().num_restarts == 0
