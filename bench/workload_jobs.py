"""A workload of the simulator as jobs for a live server."""

import random
from collections.abc import Callable, Sequence

from corun.runtime.sim.workloads import Workload, WorkloadRequest
from load import Job, Sample, Send, timed_loop

_FIRST_TOKEN = 3  # those below it are special in many vocabularies


def jobs_of(workload: Workload, models: Sequence[str], vocab_size: int) -> list[Job]:
    """The workload's requests, in their order; prompts are alike where their contents are.

    Args:
        workload: What is to be sent.
        models: The k-th is asked for the k-th adapter, and the first again behind the last; empty =
            as the workload names its adapters.
        vocab_size: Above the tokens that are sent.
    """
    names = models or workload.names
    return [
        Job(
            _prompt(f"request {number}", request, workload.content_tokens, vocab_size),
            names[request.adapter % len(names)],
            request.output_tokens,
        )
        for number, request in enumerate(workload.requests)
    ]


async def send_all(
    send: Send, jobs: Sequence[Job], arrivals_s: Sequence[float]
) -> tuple[list[Sample], list[str]]:
    """Send each job when it is due: samples of those that are answered, and why others are not."""
    failures: dict[int, str] = {}  # by job: a load goes on without those that are refused

    async def try_to_send(job: Job, on_tokens: Callable[[int], None]) -> None:
        try:
            await send(job, on_tokens)
        except (OSError, RuntimeError) as error:
            failures[id(job)] = f"{job.model}: {error}"

    samples = await timed_loop(try_to_send, jobs, arrivals_s)
    answered = [sample for job, sample in zip(jobs, samples, strict=True) if id(job) not in failures]
    return answered, list(failures.values())


def _prompt(own: str, request: WorkloadRequest, content_tokens: int, vocab_size: int) -> list[int]:
    tokens = [
        token
        for content_id in request.content_ids
        for token in _tokens(f"content {content_id}", content_tokens, vocab_size)
    ][: request.prompt_tokens]
    return tokens + _tokens(own, request.prompt_tokens - len(tokens), vocab_size)


def _tokens(seed: str, number: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(_FIRST_TOKEN, vocab_size), k=number)
