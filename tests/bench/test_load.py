"""The load generator's own HTTP: events that come in any pieces, and answers that are none."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from load import Job, Sample, Workload, http_sender, make_jobs, window_loop

JOB = Job([5, 6], "", 3)


def test_a_workload_is_drawn_anew_the_same() -> None:
    workload = Workload(400, 5, 3, ("a", "b", "c"), alpha=2.0, vocab_size=50)
    jobs = make_jobs(workload)
    assert jobs == make_jobs(workload) and len(jobs) == 400
    assert {len(job.prompt) for job in jobs} == {5} and {job.output_tokens for job in jobs} == {3}
    assert all(3 <= token < 50 for job in jobs for token in job.prompt)
    of_a, of_b, of_c = (sum(job.model == name for job in jobs) for name in workload.adapters)
    assert of_a > 2 * of_b > 2 * of_c > 0  # 1, 1/4, 1/9


def tokens_of(parts: Sequence[bytes]) -> list[int]:
    """Return what the sender tells of an answer that comes in ``parts``."""
    counts: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    async def run() -> None:
        async with asyncio.timeout(20), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            _, port = server.sockets[0].getsockname()
            await http_sender("127.0.0.1", port)(JOB, counts.append)

    asyncio.run(run())
    return counts


def test_events_are_counted_however_they_are_cut() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    event = b'data: {"choices":[]}\n\n'
    assert sum(tokens_of([head + event, event * 2, b"data: [DONE]\n\n"])) == 3
    whole = head + event * 3
    for cut in range(1, len(head) + len(event) + 8, 7):
        assert sum(tokens_of([whole[:cut], whole[cut:]])) == 3, cut


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\n\r\nfull,\ncome later\n", "503 Busy full, come later"),
        (b"", "the connection was closed without an answer"),
    ],
)
def test_other_answers_are_errors_of_one_line(answer: bytes, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"{said}$"):
        tokens_of([answer])


def test_a_window_has_what_came_within_it() -> None:
    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        for _ in range(job.output_tokens):
            on_tokens(1)
        if job.model == "hangs":
            await asyncio.Event().wait()
        if job.model == "fails":
            raise RuntimeError("no such model")

    def samples_of(*models: str) -> list[Sample]:
        jobs = iter([Job([], model, 3) for model in models])
        return asyncio.run(window_loop(send, jobs, 2, 0.05))

    samples = samples_of("ends", "hangs", "ends", "hangs", "never begins")
    assert [sample.num_tokens for sample in samples] == [3] * 4
    with pytest.raises(RuntimeError, match="no such model"):
        samples_of("hangs", "fails")


def test_a_window_begins_after_its_load_has_settled() -> None:
    async def send(job: Job, on_tokens: Callable[[int], None]) -> None:
        on_tokens(1)
        await settled.wait()
        on_tokens(1)
        on_tokens(2)
        await asyncio.Event().wait()

    async def window() -> list[Sample]:
        asyncio.get_running_loop().call_later(0.15, settled.set)
        return await window_loop(send, iter([Job([], "", 4)]), 1, 0.15, settle_s=0.05)

    settled = asyncio.Event()
    (sample,) = asyncio.run(window())
    assert sample.num_tokens == 3
    assert len(sample.gaps_s) == 2
