"""A workload on its way to a live server: the same requests, and prompts alike where it says so."""

import asyncio
import time
from collections.abc import Callable

import pytest
from corun.runtime.sim.workloads import Workload, WorkloadRequest
from load import Job, timed_loop
from workload_jobs import jobs_of, send_all

_WORKLOAD = Workload(
    (
        WorkloadRequest(0.0, 0, 10, 4, (5, 6)),
        WorkloadRequest(0.01, 2, 7, 5, (5,)),
        WorkloadRequest(0.02, 1, 6, 1),
        WorkloadRequest(0.05, 1, 6, 1),
    ),
    ranks=(8, 8, 16),
    max_tokens=40,
    content_tokens=4,
    names=("x", "y", "z"),
)


def test_jobs_are_the_workloads_requests() -> None:
    jobs = jobs_of(_WORKLOAD, (), 1000)
    assert [len(job.prompt) for job in jobs] == [10, 7, 6, 6]
    assert [job.output_tokens for job in jobs] == [4, 5, 1, 1]
    assert [job.model for job in jobs] == ["x", "z", "y", "y"]
    assert [job.model for job in jobs_of(_WORKLOAD, ("a", "b"), 1000)] == ["a", "a", "b", "b"]
    prompts = [job.prompt for job in jobs]
    assert prompts[0][:4] == prompts[1][:4] and prompts[0][4:7] != prompts[1][4:]
    assert prompts[2] != prompts[3]
    assert all(3 <= token < 1000 for prompt in prompts for token in prompt)
    assert jobs == jobs_of(_WORKLOAD, (), 1000)


def test_contents_longer_than_a_prompt_are_cut() -> None:
    (job,) = jobs_of(Workload((WorkloadRequest(0.0, 0, 3, 1, (5,)),), (8,), 1), ("a",), 50)
    assert len(job.prompt) == 3


def test_jobs_are_sent_when_they_are_due_and_samples_come_in_their_order() -> None:
    jobs = jobs_of(_WORKLOAD, (), 1000)
    sent: list[tuple[float, Job]] = []
    start = time.perf_counter()

    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        sent.append((time.perf_counter() - start, job))
        await asyncio.sleep(0.2 if job is jobs[0] else 0.0)  # others do not wait for it
        on_tokens(job.output_tokens)

    arrivals_s = [request.arrival_s for request in _WORKLOAD.requests]
    samples = asyncio.run(timed_loop(send, jobs, arrivals_s))
    assert [sample.num_tokens for sample in samples] == [4, 5, 1, 1]
    assert [job for _, job in sent] == jobs
    assert all(at_s >= arrival_s for (at_s, _), arrival_s in zip(sent, arrivals_s, strict=True))
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(timed_loop(send, jobs, arrivals_s[:-1]))


def test_a_load_goes_on_without_requests_that_are_refused() -> None:
    jobs = jobs_of(_WORKLOAD, (), 1000)

    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        if job is jobs[1]:
            raise RuntimeError("HTTP/1.1 429 full")
        if job is jobs[2]:
            raise ConnectionRefusedError("nobody listens")
        on_tokens(job.output_tokens)

    samples, failures = asyncio.run(send_all(send, jobs, [0.0] * len(jobs)))
    assert [sample.num_tokens for sample in samples] == [4, 1]
    assert failures == ["z: HTTP/1.1 429 full", "y: nobody listens"]
