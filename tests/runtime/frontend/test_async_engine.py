"""``AsyncEngine`` over a fake engine: streaming, stops, choices, aborts, limits, death."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.client import ProcessClient, ThreadClient
from corun.runtime.engine.messages import AddRequests, ToEngine
from corun.runtime.errors import (
    AdapterChangedError,
    AdapterError,
    ConfigError,
    EngineDeadError,
    ModelError,
    OverloadedError,
    RequestError,
    StepFailedError,
    TooManySequencesError,
    UnknownModelError,
)
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.inputs import BatchItem, PreparedRequest
from corun.runtime.frontend.outputs import LoRARequest, RequestOutput
from corun.runtime.frontend.request_client import RequestClient
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.keyed import FcfsPolicy
from support import fake_core
from support.fake_core import BOS_ID, EOS_ID, FACTORY, MAX_MODEL_LEN, TELLING_FACTORY

TESTS_DIR = Path(__file__).parents[2]
MAX_DEATH_S = 10.0  # a hang is noticed much later
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **fields})


class Harness:
    """Runs a coroutine with an engine that is started and shut down around it."""

    def __init__(self, tokenizer_dir: str) -> None:
        self._tokenizer_dir = tokenizer_dir

    def config(self, **fields: Any) -> EngineConfig:
        return EngineConfig(model=self._tokenizer_dir, **fields)

    def run(self, test: Callable[[AsyncEngine], Awaitable[None]], **fields: Any) -> None:
        async def body() -> None:
            client = ThreadClient(self.config(**fields), factory=FACTORY)
            async with AsyncEngine.from_client(client) as engine:
                await test(engine)
                await until(lambda: engine.get_stats().num_running == 0)

        asyncio.run(body())


@pytest.fixture
def harness(tokenizer_dir: str) -> Harness:
    return Harness(tokenizer_dir)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(engine: AsyncEngine, *args: Any, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args, **kwargs)]


def test_outputs_grow_and_deltas_add_up(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = await collect(engine, "Grüße 😀!", params(logprobs=2), "my-id")
        last = outputs[-1]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (last.request_id, last.prompt) == ("my-id", "Grüße 😀!")
        assert last.prompt_token_ids == [BOS_ID, *"Grüße 😀!".encode()]
        (choice,) = last.outputs
        assert choice.text == "Grüße 😀!"
        assert choice.token_ids == [*"Grüße 😀!".encode(), EOS_ID]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        new = [output.outputs[0] for output in outputs]
        assert "".join(one.new_text for one in new) == choice.text
        assert [token for one in new for token in one.new_token_ids] == choice.token_ids
        assert "\ufffd" not in "".join(one.text for one in new)
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        assert [entry for one in new for entry in one.new_logprobs or []] == choice.logprobs
        assert choice.logprobs[0][ord("G")].decoded_token == "G"
        assert [item.rank for item in choice.logprobs[0].values()] == [1, 2]
        assert choice.cumulative_logprob == pytest.approx(-0.5 * len(choice.token_ids))
        for earlier, later in pairwise(new):
            assert later.text.startswith(earlier.text)

    harness.run(test)


def test_a_prompt_is_cut_from_the_left(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        cut = params(truncate_prompt_tokens=4)
        for prompt in ("some text", list(b"some text")):
            last = (await collect(engine, prompt, cut))[-1]
            assert last.prompt_token_ids == list(b"text")
            assert last.prompt == (prompt if isinstance(prompt, str) else None)
            assert last.outputs[0].text == "text"
        cut = params(truncate_prompt_tokens=-1, max_tokens=10)
        last = (await collect(engine, "x" * 2 * MAX_MODEL_LEN, cut))[-1]
        assert len(last.prompt_token_ids) == MAX_MODEL_LEN - 10

    harness.run(test)


def test_earlier_outputs_do_not_change(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        seen = []
        async for output in engine.generate("some text", params()):
            choice = output.outputs[0]
            seen.append((choice, choice.text, choice.token_ids))
        assert all(choice.text == text for choice, text, _ in seen)
        assert all(choice.token_ids == token_ids for choice, _, token_ids in seen)

    harness.run(test)


def test_token_prompts_and_prompts_without_special_tokens(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        (*_, last) = await collect(engine, list(b"ids"), params())
        assert (last.prompt, last.outputs[0].text) == (None, "ids")
        (*_, last) = await collect(engine, "<s>chat", params(), add_special_tokens=False)
        assert last.prompt_token_ids == [BOS_ID, *b"chat"]

    harness.run(test)


def test_more_stop_strings_than_the_limit(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match=r"2 stop strings .* at most 1 .*--max-stop-strings"):
            await collect(engine, "abcdef", params(stop=("x", "y")))
        (*_, last) = await collect(engine, "abcdef", params(stop=("x",)))
        assert last.outputs[0].text == "abcdef"

    harness.run(test, max_stop_strings=1)


def test_sizes_are_limited_before_work(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        for sampling, flag in (
            (params(stop=("abc", "de")), "5 bytes together, at most 4 .*--max-stop-bytes"),
            (params(bad_words=("abc", "de")), "5 bytes together, at most 4 .*--max-bad-words-bytes"),
        ):
            with pytest.raises(RequestError, match=flag):
                await collect(engine, "abcdef", sampling)
        with pytest.raises(RequestError, match=r"more than 4095 tokens, .*--max-model-len"):
            await collect(engine, "a" * 100_000, params())
        sampling = params(truncate_prompt_tokens=6, stop=("abcd",), bad_words=("xy",))
        (*_, last) = await collect(engine, "a" * 100_000 + "bcdef", sampling)
        assert last.prompt_token_ids == [*b"abcdef"]

    harness.run(test, max_stop_bytes=4, max_bad_words_bytes=4)


def test_texts_wait_in_bounded_number(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        text = "a" * 5000 + "bc"
        sampling = params(truncate_prompt_tokens=3)
        with engine.tokenizer.queue.admitted(10):
            with pytest.raises(OverloadedError, match="--max-waiting-chars"):
                await collect(engine, text, sampling)
            (*_, last) = await collect(engine, "short", params())
            assert last.outputs[0].text == "short"
        (*_, last) = await collect(engine, text, sampling)
        assert last.outputs[0].text == "abc"

    harness.run(test, max_waiting_chars=5000)


def test_a_stop_string_ends_and_aborts(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        sampling = params(max_tokens=4000, ignore_eos=True, stop=("cd",))
        (*_, last) = await collect(engine, "abcdef", sampling)
        (choice,) = last.outputs
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "cd")
        assert choice.token_ids == [*b"abcd"]
        sampling = params(stop=("cd",), include_stop_str_in_output=True, min_tokens=4)
        (*_, last) = await collect(engine, "abcdef", sampling)
        assert last.outputs[0].text == "abcd"
        (*_, last) = await collect(engine, "abcdef", params(stop=("fg",)))
        assert (last.outputs[0].text, last.outputs[0].stop_reason) == ("abcdef", None)

    harness.run(test)


def test_stop_tokens_have_no_text(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        (*_, last) = await collect(engine, "abc", params(stop_token_ids=(99,)))
        (choice,) = last.outputs
        assert (choice.text, choice.token_ids, choice.stop_reason) == ("ab", [97, 98, 99], 99)

    harness.run(test)


def test_choices_have_their_own_seeds(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = await collect(engine, "abc", params(n=3, seed=5))
        assert all(len(output.outputs) == 3 for output in outputs)
        assert [choice.index for choice in outputs[-1].outputs] == [0, 1, 2]
        assert [choice.text for choice in outputs[-1].outputs] == ["abc"] * 3

    harness.run(test)


def test_without_max_tokens_the_context_is_filled(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        for max_tokens in (None, 10 * MAX_MODEL_LEN):
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            (*_, last) = await collect(engine, [97] * (MAX_MODEL_LEN - 50), sampling)
            assert len(last.outputs[0].token_ids) == 50
            assert last.outputs[0].finish_reason == "length"

    harness.run(test)


def test_every_choice_takes_the_prediction_along(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    predictions: list[int | None] = []
    send = ThreadClient.send

    def note(client: ThreadClient, message: ToEngine) -> None:
        if isinstance(message, AddRequests):
            predictions.extend(request.predicted_output_tokens for request in message.requests)
        send(client, message)

    async def test(engine: AsyncEngine) -> None:
        await collect(engine, "text", params(n=2), predicted_output_tokens=7)
        await collect(engine, "text", params())
        item = BatchItem("text", params(), None)
        await engine.generate_batch([item], predicted_output_tokens=8)

    monkeypatch.setattr(ThreadClient, "send", note)
    harness.run(test)
    assert predictions == [7, 7, None, 8]


def test_a_batch_whose_adapter_changes_on_the_way_is_made_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Sequence[PreparedRequest]] = []
    complete = RequestClient.complete

    async def change_once(client: RequestClient, batch: Sequence[PreparedRequest]) -> list[RequestOutput]:
        batches.append(batch)
        if len(batches) == 1:
            raise AdapterChangedError("another chat template")
        return await complete(client, batch)

    async def test(engine: AsyncEngine) -> None:
        outputs = await engine.generate_batch([BatchItem("text", params(), None)] * 3)
        assert all(output.finished for output in outputs)
        assert [output.request_id for output in outputs] == [one.request_id for one in batches[1]]

    monkeypatch.setattr(RequestClient, "complete", change_once)
    harness.run(test)
    assert [len(batch) for batch in batches] == [3, 3]


@pytest.mark.parametrize(
    ("prompt", "sampling", "text"),
    [
        ([97] * MAX_MODEL_LEN, params(), r"4096 tokens: .* at most 4095 .*\(--max-model-len\)"),
        ([], params(), "empty"),
        ([5, 260], params(), "id 260"),
        ("a\ud800", params(), "Unicode"),
        (
            [97] * (MAX_MODEL_LEN - 5),
            SamplingParams(max_tokens=None, min_tokens=6),
            r"min_tokens is 6.* 5 fit",
        ),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    harness: Harness, prompt: Any, sampling: SamplingParams, text: str
) -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(RequestError, match=text):
            await collect(engine, prompt, sampling, "same-id")
        assert (await collect(engine, "ok", params(), "same-id"))[-1].finished

    harness.run(test)


def test_closing_the_generator_aborts(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        async with aclosing(engine.generate("abc", LONG)) as outputs:
            async for _ in outputs:
                break

    harness.run(test)


def test_cancelling_the_consumer_aborts(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, fake_core.SILENT, LONG))
        await until(lambda: engine.get_stats().num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    harness.run(test)


def test_abort_by_id_ends_the_stream(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, fake_core.SILENT, LONG, "to-abort"))
        await until(lambda: engine.get_stats().num_running == 1)
        await engine.abort("unknown")
        await engine.abort("to-abort")
        assert [output.outputs[0].finish_reason for output in await task] == ["abort"]
        timing = task.result()[0].outputs[0].timing
        assert timing is not None
        assert (timing.first_token_s, timing.num_predicted_output_tokens) == (0.5, 7)
        assert timing.num_preemptions == 3

    harness.run(test)


def test_an_id_is_open_once(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(collect(engine, fake_core.SILENT, LONG, "one"))
        await until(lambda: engine.get_stats().num_running == 1)
        with pytest.raises(RequestError, match="id 'one' is already open"):
            await collect(engine, "x", params(), "one")
        await engine.abort("one")
        await task

    harness.run(test)


def test_both_limits_refuse(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        silent = [
            asyncio.create_task(collect(engine, fake_core.SILENT, LONG, f"{index}")) for index in range(2)
        ]
        await until(lambda: engine.get_stats().num_running == 2)
        with pytest.raises(OverloadedError, match="2 requests wait"):  # the engine's own
            await collect(engine, "x", params())
        with pytest.raises(OverloadedError, match=r"2 requests are open.*--max-num-waiting"):
            await collect(engine, "x", params(n=2))
        with pytest.raises(TooManySequencesError, match=r"4 sequences, .* at most 3"):
            await collect(engine, "x", params(n=4))
        for index in range(2):
            await engine.abort(f"{index}")
        await asyncio.gather(*silent)

    harness.run(test, max_num_seqs=1, max_num_waiting=2)


def test_a_failed_request_raises_alone(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        failed, fine = await asyncio.gather(
            collect(engine, fake_core.FAIL, params(n=2)),
            collect(engine, "fine", params()),
            return_exceptions=True,
        )
        assert isinstance(failed, StepFailedError)
        assert "not a number" in str(failed)
        assert failed.timing is not None and failed.timing.parts == {"kv_memory": 0.5}
        assert isinstance(fine, list)

    harness.run(test)


def test_a_slow_consumer_gets_merged_outputs(harness: Harness) -> None:
    async def test(engine: AsyncEngine) -> None:
        outputs = []
        async for output in engine.generate("x" * 500, params(max_tokens=1000)):
            outputs.append(output)
            await asyncio.sleep(0.05)
        assert outputs[-1].outputs[0].text == "x" * 500
        assert len(outputs) < 400

    harness.run(test)


def test_adapters(harness: Harness, tmp_path: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        upper = LoRARequest("upper", 1, str(tmp_path))
        answers = await asyncio.gather(
            *(collect(engine, "text", params(), lora_request=upper) for _ in range(4))
        )
        assert {answer[-1].outputs[0].text for answer in answers} == {"TEXT"}
        assert [(info.name, info.version) for info in engine.list_loras()] == [("upper", "1")]
        await engine.add_lora(upper)
        assert engine.list_loras()[0].version == "1"
        await engine.add_lora(upper, reload=True)
        assert engine.list_loras()[0].version == "2"
        other = tmp_path / "other"
        other.mkdir()
        await engine.add_lora(LoRARequest("upper", 1, str(other)))
        assert (engine.list_loras()[0].version, engine.list_loras()[0].path) == ("3", str(other))
        by_name = await collect(engine, "text", params(), lora_request="upper")
        assert by_name[-1].outputs[0].text == "TEXT"
        with pytest.raises(UnknownModelError, match="did you mean 'upper'"):
            await collect(engine, "text", params(), lora_request="uper")
        with pytest.raises(AdapterError, match="no directory"):
            await engine.add_lora(LoRARequest("missing", 2, str(tmp_path / "missing")))
        await engine.remove_lora("upper")
        assert engine.list_loras() == []
        with pytest.raises(UnknownModelError):
            await engine.remove_lora("upper")

    harness.run(test)


def test_a_killed_engine_fails_every_request_in_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS_DIR))

    async def run() -> None:
        client = ProcessClient(harness.config(), factory=FACTORY)
        async with AsyncEngine.from_client(client) as engine:
            tasks = [asyncio.create_task(collect(engine, fake_core.SILENT, LONG))]
            tasks += [asyncio.create_task(collect(engine, "abc", LONG)) for _ in range(5)]
            await until(lambda: engine.get_stats().num_running == 6)
            assert engine.error is None
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(MAX_DEATH_S):
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert "SIGKILL" in str(await engine.wait_dead())
            assert [type(result) for result in results] == [EngineDeadError] * 6
            assert engine.error is not None
            with pytest.raises(EngineDeadError):
                await collect(engine, "too late", params())
            with pytest.raises(EngineDeadError):
                await engine.add_lora(LoRARequest("a", 1, "/"))

    asyncio.run(run())


def test_shutdown_fails_what_is_open(harness: Harness) -> None:
    async def run() -> None:
        engine = AsyncEngine.from_client(ThreadClient(harness.config(), factory=FACTORY))
        task = asyncio.create_task(collect(engine, fake_core.SILENT, LONG))  # starts it
        await until(lambda: engine.get_stats().num_running == 1)
        await engine.shutdown()
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task

    asyncio.run(run())


def test_a_failed_start_is_raised_to_all(harness: Harness) -> None:
    async def run() -> None:
        config = EngineConfig(model=fake_core.FAILING_MODEL)
        engine = AsyncEngine.from_client(ThreadClient(config, factory=FACTORY))
        for _ in range(2):
            with pytest.raises(ModelError, match="cannot load"):
                await engine.start()
        await engine.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("factory", [FACTORY, TELLING_FACTORY])
def test_a_given_chat_template_and_the_tokenizer_of_transformers(harness: Harness, factory: str) -> None:
    async def run() -> None:
        client = ThreadClient(harness.config(), factory=factory)
        template = "{{ messages[0].content }}{{ eos_token }}"
        async with AsyncEngine.from_client(client, chat_template=template) as engine:
            messages = [{"role": "user", "content": "Hi"}]
            assert engine.tokenizer.apply_chat_template(messages) == "Hi</s>"
            (*_, last) = await collect(engine, "told", params())
            assert last.outputs[0].text == "told"
            hf = engine.get_tokenizer()
            assert hf.decode(engine.tokenizer.encode("told")) == "<s>told"
            assert engine.get_tokenizer() is hf

    asyncio.run(run())


def test_options_make_a_config(tokenizer_dir: str) -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        AsyncEngine(EngineConfig(model=tokenizer_dir), max_num_seqs=3)


def test_another_process_takes_policies_by_name_only(tokenizer_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"FcfsPolicy.* own_process=True .*a name"):
        AsyncEngine(own_process=True, model=tokenizer_dir, scheduling_policy=FcfsPolicy)
