"""``Engine``: batches, adapters, notebooks, threads, and global state that it must not change."""

import asyncio
import gc
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.errors import (
    AdapterError,
    EngineDeadError,
    ModelError,
    OverloadedError,
    RequestError,
    StepFailedError,
    UnknownModelError,
)
from corun.runtime.frontend.engine import THREAD_PREFIX, Engine
from corun.runtime.frontend.outputs import LoRARequest, RequestOutput
from corun.runtime.sampling import SamplingParams
from support import fake_core
from support.fake_core import BOS_ID, FACTORY

TESTS_DIR = Path(__file__).parents[2]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **fields})


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)}


def until_no_thread_is_left() -> None:
    deadline_s = time.monotonic() + 20
    while engine_threads():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def run_script(directory: Path, text: str) -> str:
    """Run a user's script, with warnings as errors; return what it printed."""
    script = directory / "script.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={"PYTHONPATH": str(TESTS_DIR), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.fixture
def engine(tokenizer_dir: str) -> Iterator[Engine]:
    with Engine(model=tokenizer_dir, max_num_waiting=4, factory=FACTORY) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("one", ["one"]),
        (["one"], ["one"]),
        (["one", list(b"two"), "three"], ["one", "two", "three"]),
        (list(b"ids"), ["ids"]),
        ([list(b"a"), (98, 99)], ["a", "bc"]),
        ([], []),
    ],
)
def test_prompts_of_every_kind(engine: Engine, prompts: Any, expected: list[str]) -> None:
    assert texts(engine.generate(prompts, params())) == expected


def test_outputs_are_complete_and_in_order(engine: Engine) -> None:
    prompts = [f"{'long ' * (7 - index)}{index}" for index in range(30)]  # more than may wait
    outputs = engine.generate(prompts, params())
    assert texts(outputs) == prompts
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)
    assert outputs[0].prompt_token_ids == [BOS_ID, *prompts[0].encode()]
    assert len({output.request_id for output in outputs}) == 30


def test_one_of_each_per_prompt(engine: Engine, tmp_path: Path) -> None:
    lora = LoRARequest("upper", 1, str(tmp_path))
    sampling = [params(), params(max_tokens=2), params(n=2, logprobs=1, stop="e")]
    outputs = engine.generate(["one", "two", "three"], sampling, [None, lora, "upper"])
    assert texts(outputs) == ["one", "TW", "THREE"]
    assert [len(output.outputs) for output in outputs] == [1, 1, 2]
    assert [output.lora_request for output in outputs] == [None, lora, "upper"]
    assert outputs[1].outputs[0].finish_reason == "length"
    assert outputs[2].outputs[0].logprobs is not None
    assert outputs[0].outputs[0].logprobs is None


def test_more_choices_than_may_wait_are_asked_for_when_nothing_else_is_open(engine: Engine) -> None:
    with pytest.raises(OverloadedError, match="4 requests wait"):  # the engine's own answer
        engine.generate(["one", "two"], params(n=5))
    assert texts(engine.generate("next", params(n=4))) == ["next"]


def test_stop_strings_free_the_engine(engine: Engine) -> None:
    sampling = params(max_tokens=4000, ignore_eos=True, stop="cd")
    assert texts(engine.generate(["abcdef"] * 8, sampling)) == ["ab"] * 8
    engine.generate("another", params())  # lets the aborts come through
    assert engine.get_stats().num_running == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((["a", "b"], [SamplingParams()]), "sampling_params has 1 entries for 2 prompts"),
        ((["a", "b"], None, ["x"]), "lora_request has 1 entries for 2 prompts"),
        (([1, "a"],), "mix token ids with 'a'"),
        (("a", [3]), "sampling_params has 3"),
        (("a", None, [3]), "lora_request is 3"),
        ((["ok", []],), "empty"),
        ((["ok", [9999]],), "id 9999"),
        (([[97] * 4090], SamplingParams(max_tokens=None, min_tokens=7)), "min_tokens is 7"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(engine: Engine, arguments: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        engine.generate(*arguments)
    assert engine.get_stats().num_steps == 0


@pytest.mark.parametrize("predicted", [0, -1, 2**31])
def test_a_prediction_of_no_tokens_is_refused(engine: Engine, predicted: int) -> None:
    with pytest.raises(RequestError, match=f"predicted_output_tokens is {predicted}") as caught:
        engine.generate("text", params(), predicted_output_tokens=predicted)
    assert caught.value.param == "predicted_output_tokens"
    assert engine.get_stats().num_steps == 0


def test_an_empty_text_is_a_prompt_if_special_tokens_make_it_one(engine: Engine) -> None:
    (output,) = engine.generate("", params())
    assert (output.prompt_token_ids, output.outputs[0].text) == ([BOS_ID], "")


def test_adapters(engine: Engine, tmp_path: Path) -> None:
    engine.add_lora(LoRARequest("upper", 1, str(tmp_path)))
    engine.add_lora(LoRARequest("upper", 1, str(tmp_path)))
    assert [(info.name, info.version) for info in engine.list_loras()] == [("upper", "1")]
    assert texts(engine.generate("text", params(), "upper")) == ["TEXT"]
    with pytest.raises(AdapterError, match="no directory"):
        engine.add_lora(LoRARequest("missing", 2, str(tmp_path / "missing")))
    engine.remove_lora("upper")
    with pytest.raises(UnknownModelError):
        engine.generate("text", params(), "upper")
    with pytest.raises(UnknownModelError):
        engine.remove_lora("upper")


def test_a_failed_request_aborts_the_batch_and_raises(engine: Engine) -> None:
    with pytest.raises(StepFailedError, match="not a number"):
        engine.generate(["fine " * 50, fake_core.FAIL, "fine"], params(max_tokens=1000))
    assert texts(engine.generate("next", params())) == ["next"]
    assert engine.get_stats().num_running == 0


def test_seeds_repeat_with_the_engine_and_differ_between_requests(
    tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[fake_core.FakeAssembly] = []

    def build(config: EngineConfig, **arguments: Any) -> fake_core.FakeAssembly:
        built.append(fake_core.FakeAssembly(config))
        return built[-1]

    monkeypatch.setattr(fake_core, "build", build)

    def seeds_of() -> list[int | None]:
        with Engine(model=tokenizer_dir, seed=3, factory=FACTORY) as engine:
            engine.generate(["a", "b"], params(n=2))
            engine.generate("c", params(seed=7, n=2))
            return built[-1].core.seeds

    seeds = seeds_of()
    assert seeds == seeds_of()
    assert len(set(seeds)) == 6
    assert seeds[4] == 7


def test_closing(tokenizer_dir: str) -> None:
    engine = Engine(EngineConfig(model=tokenizer_dir), factory=FACTORY)
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("a")


def test_a_failed_start_is_raised() -> None:
    with pytest.raises(ModelError, match="cannot load"):
        Engine(model=fake_core.FAILING_MODEL, factory=FACTORY)


def test_a_missing_tokenizer_frees_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        Engine(model=str(tmp_path), factory=FACTORY)


def test_it_runs_inside_a_running_event_loop(engine: Engine) -> None:
    async def cell() -> list[RequestOutput]:
        return engine.generate(["in", "a notebook"], params())

    assert texts(asyncio.run(cell())) == ["in", "a notebook"]


def test_threads_share_the_engine(engine: Engine) -> None:
    answers: dict[int, list[str]] = {}

    def work(index: int) -> None:
        prompts = [f"{index}-{number}" for number in range(10)]
        answers[index] = texts(engine.generate(prompts, params()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {index: [f"{index}-{number}" for number in range(10)] for index in range(4)}


def test_an_interrupt_withdraws_the_batch_and_leaves_the_engine_sound(engine: Engine) -> None:
    def interrupt() -> None:
        while engine.get_stats().num_running == 0:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    # A process that a shell starts in the background ignores interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["fine", fake_core.SILENT], params())
        killer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert texts(engine.generate("next", params())) == ["next"]
    assert engine.get_stats().num_running == 0


def test_closing_fails_what_runs(tokenizer_dir: str) -> None:
    engine = Engine(model=tokenizer_dir, factory=FACTORY)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            engine.generate(fake_core.SILENT, params())
        except EngineDeadError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while engine.get_stats().num_running == 0:
        time.sleep(0.01)
    engine.close()
    waiter.join()
    assert len(errors) == 1


def test_a_bug_in_a_step_is_raised_and_ends_the_engine(engine: Engine) -> None:
    with pytest.raises(EngineDeadError, match="RuntimeError: the step was told to crash"):
        engine.generate(fake_core.CRASH, params())
    with pytest.raises(EngineDeadError, match="told to crash"):
        engine.generate("more", params())


def test_an_engine_that_hangs_fails_its_requests_and_can_be_closed(tokenizer_dir: str) -> None:
    fake_core.UNSTUCK.clear()
    try:
        with Engine(model=tokenizer_dir, factory=FACTORY, engine_hang_s=0.5) as engine:
            assert engine.hang_watch.reason is None
            with pytest.raises(EngineDeadError, match=r"no progress.*engine-hang-s"):
                engine.generate(["fine", fake_core.STUCK], params())
            with pytest.raises(EngineDeadError, match="no progress"):
                engine.generate("more", params())
            assert engine.hang_watch.stalled_s >= 4 * 0.5
    finally:
        fake_core.UNSTUCK.set()
    until_no_thread_is_left()


def test_a_forgotten_engine_is_freed(tokenizer_dir: str) -> None:
    earlier = engine_threads()
    engine = Engine(model=tokenizer_dir, factory=FACTORY)
    engine.generate("text", params())
    del engine
    gc.collect()
    assert engine_threads() <= earlier


def test_an_engine_that_its_own_thread_lets_go_is_freed(tokenizer_dir: str) -> None:
    """The garbage collector can run in any thread, including the engine's."""
    engine = Engine(model=tokenizer_dir, factory=FACTORY)
    engine.generate("text", params())
    holders = [engine]
    own = threading.Thread(target=holders.clear, name=f"{THREAD_PREFIX}any")
    del engine
    own.start()
    own.join(20)
    assert not own.is_alive()
    until_no_thread_is_left()


def test_a_script_that_closes_nothing_ends(tokenizer_dir: str, tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        "import corun\n"
        f"engine = corun.Engine(model={tokenizer_dir!r}, factory={FACTORY!r})\n"
        "print(engine.generate('text', corun.SamplingParams(max_tokens=50))[0].outputs[0].text)\n",
    )
    assert output == "text\n"


def test_global_state_is_left_alone(tokenizer_dir: str) -> None:
    def state() -> tuple[object, ...]:
        root = logging.getLogger()
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return (handlers, tuple(root.handlers), root.level)

    before, threads = state(), set(threading.enumerate())
    with Engine(model=tokenizer_dir, factory=FACTORY) as engine:
        engine.generate("text", params())
        assert state() == before
    assert state() == before and set(threading.enumerate()) <= threads


def test_a_forked_process_leaves_the_engine_alone(tokenizer_dir: str, tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        "import corun, os, sys\n"
        f"with corun.Engine(model={tokenizer_dir!r}, factory={FACTORY!r}) as engine:\n"
        "    sampling = corun.SamplingParams(max_tokens=50)\n"
        "    engine.generate('before', sampling)\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        sys.exit(engine.close())\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    print(engine.generate('after', sampling)[0].outputs[0].text)\n",
    )
    assert output == "after\n"


def test_it_needs_no_main_guard(tokenizer_dir: str, tmp_path: Path) -> None:
    output = run_script(
        tmp_path,
        "import asyncio, corun\n"
        "from corun.runtime.engine.client import ProcessClient\n"
        f"config = corun.EngineConfig(model={tokenizer_dir!r})\n"
        "sampling = corun.SamplingParams(max_tokens=50)\n"
        f"with corun.Engine(config, factory={FACTORY!r}) as engine:\n"
        "    print(engine.generate('sync', sampling)[0].outputs[0].text)\n"
        "async def main():\n"
        f"    client = ProcessClient(config, factory={FACTORY!r})\n"
        "    async with corun.AsyncEngine.from_client(client) as engine:\n"
        "        async for output in engine.generate('async', sampling):\n"
        "            pass\n"
        "        print(output.outputs[0].text)\n"
        "asyncio.run(main())\n",
    )
    assert output.split() == ["sync", "async"]


def test_a_closed_engine_keeps_no_model(tokenizer_dir: str) -> None:
    """Even while the closed engine itself is referenced, as after a with block."""
    with Engine(model=tokenizer_dir, factory=FACTORY) as engine:
        engine.generate("one", params())
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is fake_core.FakeCore]
    assert engine.get_stats().num_running == 0
