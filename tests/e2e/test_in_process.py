"""``Engine`` and ``AsyncEngine`` with the demo model in the caller's own process."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import corun
import httpx
import pytest
from corun import (
    AsyncEngine,
    ConfigError,
    Engine,
    LoRARequest,
    PolicyFacts,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    StepFailedError,
    UnknownModelError,
    Verdict,
)
from corun.runtime.demo import chat_prompt, demo_adapters_path
from corun.runtime.scheduler.keyed import FcfsPolicy
from corun.runtime.server.app import build_app
from corun.runtime.server.settings import AppSettings
from corun.runtime.server.state import make_state
from demo.tasks import unseen_examples
from support.demo_answers import ADAPTERS
from support.overflow import make_overflowing

GREEDY = SamplingParams(temperature=0, max_tokens=48)
SCRIPT = Path(__file__).with_name("in_process_script.py")
MAX_FILES_ENTERED = 120
# Files that threads of their own enter by the clock, for no request.
BY_THE_CLOCK = {"runtime/adapters/dir_changes.py", "runtime/file_calls.py", "runtime/machine/cgroup.py"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(cpu_threads=1) as engine:
        yield engine


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_one_prompt_of_the_base(engine: Engine) -> None:
    (output,) = engine.generate(chat_prompt("hello"))
    assert output.finished
    assert output.prompt == chat_prompt("hello")
    (choice,) = output.outputs
    assert choice.text == "You said: hello"
    assert choice.finish_reason == "stop"


def test_a_prompt_is_scored_without_a_token(engine: Engine) -> None:
    scored = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, logprobs=1)
    (alone,) = engine.generate(chat_prompt("hello"), scored)
    (choice,) = alone.outputs
    assert (choice.text, choice.token_ids, choice.logprobs) == ("", [], [])
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    assert alone.prompt_logprobs is not None
    assert len(alone.prompt_logprobs) == len(alone.prompt_token_ids)


def test_parameters_and_adapters_per_prompt(engine: Engine) -> None:
    """Base and adapters of all ranks in one batch, each request with its own parameters."""
    examples = {task: unseen_examples(task, 10, 2) for task in ADAPTERS}
    asked = [
        (task, *example)
        for row in zip(*examples.values(), strict=True)
        for task, example in zip(ADAPTERS, row, strict=True)
    ]
    prompts = [chat_prompt(text) for _, text, _ in asked]
    loras: list[LoRARequest | None] = [
        LoRARequest(task, 1 + ADAPTERS.index(task), str(demo_adapters_path() / task)) for task, _, _ in asked
    ]
    outputs = engine.generate([*prompts, *prompts[:4]], GREEDY, [*loras, None, None, None, None])
    answers = texts(outputs)
    right = [got == want for got, (_, _, want) in zip(answers, asked, strict=False)]
    assert sum(right) >= 0.8 * len(right)
    for text, (_, said, _) in zip(answers[-4:], asked, strict=False):
        assert text == f"You said: {said}"
    short = SamplingParams(temperature=0, max_tokens=2)
    mixed = engine.generate(prompts[:2], [short, GREEDY], loras[:2])
    assert [len(mixed[0].outputs[0].token_ids), texts(mixed)[1]] == [2, answers[1]]
    assert mixed[0].outputs[0].finish_reason == "length"


def test_conversations_by_the_template_of_the_base_and_of_an_adapter(engine: Engine, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert engine.apply_chat_template(hello) == chat_prompt("hello")
    own = tmp_path / "own"
    shutil.copytree(demo_adapters_path() / "upper", own)
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}{{ mark }}")
    lora = LoRARequest("own", 20, str(own))
    for named in (lora, "own"):
        text = engine.apply_chat_template(hello, named, chat_template_kwargs={"mark": "!"})
        assert text == "hello!"
    open_end = engine.apply_chat_template(hello, continue_final_message=True)
    assert open_end.endswith("hello")
    with pytest.raises(UnknownModelError, match="nobody"):
        engine.apply_chat_template(hello, "nobody")
    engine.remove_lora("own")


def test_token_ids_choices_and_logprobs(engine: Engine) -> None:
    ids = engine.get_tokenizer().encode("One evening", add_special_tokens=False)
    params = SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=12, logprobs=2)
    (output,) = engine.generate(ids, params)
    assert output.prompt is None
    assert output.prompt_token_ids == ids
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        for token_id, candidates in zip(choice.token_ids, choice.logprobs, strict=True):
            assert candidates[token_id].logprob <= 0
    (again,) = engine.generate(ids, params)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_adapters_come_and_go(engine: Engine, tmp_path: Path) -> None:
    path = shutil.copytree(demo_adapters_path() / "upper", tmp_path / "a")
    lora = LoRARequest("mine", 9, str(path))
    engine.add_lora(lora)
    assert "mine" in [info.name for info in engine.list_loras()]
    assert texts(engine.generate([chat_prompt("hello")], GREEDY, "mine")) == ["HELLO"]
    shutil.rmtree(path)
    shutil.copytree(demo_adapters_path() / "vowels", path)
    engine.add_lora(lora, reload=True)
    assert texts(engine.generate([chat_prompt("hello")], GREEDY, "mine")) == ["h*ll*"]
    engine.remove_lora("mine")
    with pytest.raises(UnknownModelError, match="mine"):
        engine.generate("a", GREEDY, "mine")


def test_wrong_prompts(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"maximum context length is 512 tokens.*600"):
        engine.generate("a" * 600, GREEDY)
    with pytest.raises(RequestError, match="99999"):
        engine.generate([99999], GREEDY)
    with pytest.raises(RequestError):
        engine.generate("", GREEDY)


def test_an_overflowing_adapter_fails_alone(tmp_path: Path) -> None:
    """In one batch: the adapter's request fails, the others are correct, and so are later ones."""

    async def answer(engine: AsyncEngine, task: str, text: str) -> str:
        last = None
        async for output in engine.generate(chat_prompt(text), GREEDY, lora_request=task):
            last = output
        assert last is not None
        return last.outputs[0].text

    async def run() -> None:
        # So few blocks that those of the failed requests are used again.
        async with AsyncEngine(memory_gib=0.006, max_model_len=64, cpu_threads=1) as engine:
            path = make_overflowing(tmp_path / "huge")
            await engine.add_lora(LoRARequest("huge", 1, str(path)))
            for text in ("hello", "planet", "a very long road"):
                results = await asyncio.gather(
                    answer(engine, "upper", text),
                    answer(engine, "huge", text),
                    answer(engine, "reverse", "planet"),
                    answer(engine, "huge", "planet"),
                    return_exceptions=True,
                )
                assert list(results[0::2]) == [text.upper(), "tenalp"]
                for failure in results[1::2]:
                    assert isinstance(failure, StepFailedError)
                    assert "finite" in str(failure)
            assert engine.get_stats().kv_blocks_used == 0

    asyncio.run(run())


def test_script_without_a_main_guard() -> None:
    """Under a running event loop, with warnings as errors; nothing global changes."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "answers": ["IN A LOOP", "pool a ni"],
        "changed": [],
        "torch threads": [1],  # of the engine that was to have one
        "threads": [],
    }
    assert done.stderr == ""


HOLD_S = 0.1
WAIT_S = 30.0


class HeldBack(FcfsPolicy):
    """Admits a request only some time after its arrival, when nothing else happens."""

    def candidates(self, now_s: float) -> Generator[Request, Verdict, None]:
        wake_at_s = self.wake_at_s()
        if wake_at_s is not None and now_s >= wake_at_s:
            yield from super().candidates(now_s)

    def wake_at_s(self) -> float | None:
        waiting = self.upcoming(1)
        return waiting[0].arrival_s + HOLD_S if waiting else None


def test_a_policy_of_ones_own_is_woken_when_it_wants() -> None:
    """An engine that sleeps until something happens would never admit its request."""

    async def ask() -> tuple[str, float]:
        async with AsyncEngine(scheduling_policy=HeldBack, cpu_threads=1) as engine, asyncio.timeout(WAIT_S):
            asked_s = time.monotonic()
            outputs = [output async for output in engine.generate(chat_prompt("hello"), GREEDY)]
            return outputs[-1].outputs[0].text, time.monotonic() - asked_s

    text, duration_s = asyncio.run(ask())
    assert text == "You said: hello"
    assert duration_s >= HOLD_S


def test_a_policy_that_cannot_be_made_keeps_the_engine_from_starting() -> None:
    def broken(facts: PolicyFacts) -> FcfsPolicy:
        raise ConfigError(f"{facts.capacity_tokens} tokens of KV are not enough for me")

    with pytest.raises(ConfigError, match=r"\d tokens of KV are not enough"):
        Engine(scheduling_policy=broken)


def test_a_warm_streamed_request_enters_few_files() -> None:
    """These files have to be read to follow one request. The limit may fall, not rise."""
    root = f"{Path(corun.__file__).parent}/"
    entered: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    async def ask(http: httpx.AsyncClient) -> set[str]:
        entered.clear()
        messages = [{"role": "user", "content": "planet"}]
        body = {"model": "upper", "messages": messages, "stream": True, "temperature": 0, "max_tokens": 8}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text
        names = {name.removeprefix(root) for name in entered if name.startswith(root)}
        return {name for name in names if not name.startswith((".venv/", "tests/"))} - BY_THE_CLOCK

    async def trace() -> set[str]:
        async with AsyncEngine(cpu_threads=1) as engine:
            app = build_app(make_state(engine, AppSettings(), now_s=0))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                for _ in range(4):
                    await ask(http)
                return await ask(http) & await ask(http)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        files = asyncio.run(trace())
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert "runtime/scheduler/scheduler.py" in files and "gpu/execution/executor.py" in files
    assert len(files) <= MAX_FILES_ENTERED, "\n".join(sorted(files))
