"""A fake engine for the HTTP server: deterministic text, controllable speed and faults."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.adapters.mix import LoRAMix
from corun.runtime.adapters.names import taken_name
from corun.runtime.engine.heartbeat import HangWatch, LoopActivity, Signs
from corun.runtime.engine.messages import EngineStats, LinkUsage, MachineReport, ModelInfo
from corun.runtime.engine_state import Residency
from corun.runtime.errors import (
    AdapterError,
    CorunError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    UnknownModelError,
)
from corun.runtime.frontend.engine_watch import EngineWatches
from corun.runtime.frontend.inputs import (
    LoraDirectory,
    MadePrompt,
    check_prompt,
    lora_name_of,
    truncate_prompt,
)
from corun.runtime.frontend.outputs import (
    ChoiceHistory,
    CompletionOutput,
    Logprob,
    LoRARequest,
    RequestOutput,
    RequestWatch,
    TokenCandidates,
)
from corun.runtime.limits import TextLimit, check_predicted_output, check_stops
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.events import AdapterStart
from corun.runtime.scheduler.step_times import LearnedTimes
from corun.runtime.timing import EngineTiming

BASE_NAME = "tiny"
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 0x110000  # a token is a character


class FakeTokenizer:
    """One token per character; the chat template writes tools, role and content."""

    mark_ids: Mapping[str, int] = {}
    special_texts: Sequence[str] = ()
    leaves_tools_out = False

    def hides(self, text: str) -> bool:
        return any(special in text for special in self.special_texts)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        text: str = template_arguments.get("preamble", "")
        if not self.leaves_tools_out:
            tools = template_arguments.get("tools", ())
            text += "".join(f"<tool>{tool['function']['name']}" for tool in tools)
        for message in messages:
            if message["content"] == "refuse me":
                raise RequestError(
                    "the model's chat template refuses the messages: roles must alternate", param="messages"
                )
            text += f"<{message['role']}>{message['content']}"
            if not self.leaves_tools_out:
                calls = message.get("tool_calls", ())
                text += "".join(f"<call>{call['function']}" for call in calls)
        if continue_final_message:
            assert not add_generation_prompt
            return text
        if messages[-1]["role"] == "assistant":
            text += "</s>"
        return text + ("<assistant>" if add_generation_prompt else "")

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit | None = None
    ) -> list[int]:
        return [1] * add_special_tokens + list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return list(map(self.token_text, token_ids))

    def token_text(self, token_id: int) -> str:
        return f"token {token_id}"


def expected_text(prompt: str, num_tokens: int, *, adapter: str = "base", choice: int = 0) -> str:
    """Return the fake engine's output: the same characters, repeated."""
    phrase = f'{adapter}/{choice}/{prompt[-8:]}€\n"{{ '
    return (phrase * (num_tokens // len(phrase) + 1))[:num_tokens]


class FakeEngine:
    """Satisfies ``EnginePort``. Attributes may be changed while the server runs."""

    def __init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.watches = EngineWatches()
        self.reset()

    def reset(self) -> None:
        """Reset to the state of a new engine."""
        self.error: CorunError | None = None
        self.vocab_size: int | None = None  # of the adapter; None = the base's
        self.answer: str | None = None  # in place of the usual text
        self.chat_template: str | None = None  # for the form of answers
        self.stats = EngineStats(
            num_running=2,
            num_waiting=1,
            kv_blocks_used=25,
            kv_blocks_total=100,
            invalid_kv_bytes=7,
            preemptions={"kv_memory": 3, "squash": 1},
            memory_bytes={"device": {"history_kv": 8, "free": 9}},
            first_token_parts_s={"order": 1.5, "kv_memory": 2.5},
            link=(LinkUsage("to_device", "kv", 11, 0.5),),
            policy_counts={"num_queues": 2.0, "queue_1_quota_tokens": 5.0},
            running_adapters=("upper",),
            waiting_adapters=("digits",),
        )
        self.adapters = {
            "upper": make_adapter("upper", rank=8),
            "digits": make_adapter("digits", rank=64, level="host"),
            "broken": make_adapter(
                "broken", state="failed", level="disk", reason="rank 512 is over the limit"
            ),
        }
        self.default_sampling: dict[str, float] = {"temperature": 0.5, "top_k": 20.0}
        self.tokens_per_output = 3
        self.max_open = 1000
        self.fail_after_tokens: int | None = None
        self.num_steps = 0  # in its statistics
        self.held = threading.Event()  # while set, requests make no progress
        self.hold_after_first = True  # held requests give their first output
        self.dies_silently = False  # requests do not notice that the engine is dead
        self.num_open = 0
        self.num_continued = 0  # requests for outputs after a first one
        self.num_aborted = 0
        self.num_asked = 0  # requests of statistics
        self.num_heartbeats = 0
        self.stall(0)
        self.num_requests_sent = 0
        self.num_requests_received = 0
        self.machine = MachineReport(LearnedTimes(1).machine_model(), 1e8, 64, is_measured=False)
        self.seen: list[tuple[str | list[int], SamplingParams, str | None, str]] = []
        self.seen_predictions: list[int | None] = []
        self.seen_special_tokens: list[bool] = []  # option of each text prompt

    def stall(self, duration_s: int) -> None:
        """Let its front end see no progress for so long."""
        self.hang_watch = HangWatch(limit_s=30.0)
        for second in range(duration_s + 1):
            signs = Signs(second, 0, LoopActivity.WORKING, 7, 3, 0)
            self.hang_watch.look(signs, float(second))

    def get_model_info(self) -> ModelInfo:
        return ModelInfo(
            name="demo/tiny",
            dtype="float32",
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=512,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(0,),
            default_sampling=self.default_sampling,
            kv_capacity_tokens=1600,
            memory_bytes=1 << 30,
            max_num_waiting=8,
            model_path="demo/tiny",
            device_choices={"sync": "host", "link": "unpaced"},
            backends={"attention": "triton", "LoRA": "torch"},
            summary=("tiny model", "on cpu"),
        )

    def get_stats(self) -> EngineStats:
        return self.stats

    @property
    def stats_age_s(self) -> float:
        return 0.5

    async def refresh_stats(self, timeout_s: float) -> EngineStats:
        self.stats = msgspec.structs.replace(self.stats, num_steps=self.num_steps)
        return self.stats

    async def refresh_machine(self, timeout_s: float) -> MachineReport:
        return self.machine

    async def conventions_of(self, lora: str | LoRAMix | None) -> "FakeEngine":
        return self

    def templates(self) -> list[tuple[str | None, str | None]]:
        return [(None, self.chat_template)]

    @property
    def apply_chat_template(self) -> Callable[..., str]:
        return self.tokenizer.apply_chat_template

    def ask_stats(self) -> None:
        self.num_asked += 1

    async def wait_dead(self) -> CorunError:
        while self.error is None:
            await asyncio.sleep(0.005)
        return self.error

    @property
    def loras(self) -> LoraDirectory:
        return LoraDirectory(self.list_loras())

    async def find_lora(self, lora_name: str) -> None:
        """Do nothing: it knows all adapters."""

    def list_loras(self) -> tuple[AdapterInfo, ...]:
        return tuple(self.adapters.values())

    async def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        reload: bool = False,
        pinned: bool | None = None,
        replace: bool = True,
    ) -> None:
        if "missing" in lora_request.lora_path:
            raise AdapterError(f"there is no directory {lora_request.lora_path!r}")
        name = lora_request.lora_name
        known = self.adapters.get(name)
        if known is not None and not replace and known.path != lora_request.lora_path:
            raise taken_name(name)
        self.adapters[name] = make_adapter(name, path=lora_request.lora_path)
        if pinned is not None:
            await self.pin_lora(name, pinned=pinned)

    async def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None:
        if lora_name not in self.adapters:
            raise UnknownModelError(f"no adapter is named {lora_name!r}")
        adapter = self.adapters[lora_name]
        self.adapters[lora_name] = msgspec.structs.replace(adapter, pinned=pinned)

    async def remove_lora(self, lora_name: str) -> None:
        del self.adapters[lora_name]

    async def generate(
        self,
        prompt: str | list[int] | Callable[[Any], Awaitable[MadePrompt]],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | LoRAMix | None = None,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
        add_special_tokens: bool = True,
        watch: RequestWatch | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        check_predicted_output(predicted_output_tokens)
        check_stops(sampling_params.stop, max_stop_strings=16, max_stop_bytes=1 << 14)
        if callable(prompt):
            made = await prompt(await self.conventions_of(lora_request))
            prompt, sampling_params = made.token_ids, made.params
        self.seen.append((prompt, sampling_params, lora_name_of(lora_request), cache_salt))
        self.seen_predictions.append(predicted_output_tokens)
        prompt_ids = list(map(ord, prompt)) if isinstance(prompt, str) else prompt
        if isinstance(prompt, str):
            self.seen_special_tokens.append(add_special_tokens)
        prompt_ids = list(truncate_prompt(prompt_ids, sampling_params, MAX_MODEL_LEN))
        check_prompt(prompt_ids, MAX_MODEL_LEN, self.get_model_info().vocab_size)
        if self.num_open >= self.max_open:
            raise OverloadedError(f"{self.max_open} requests are waiting (--max-num-waiting)")
        self.num_open += 1
        self.num_requests_sent += sampling_params.n
        self.watches.sent(request_id, self.num_requests_sent)
        if watch is not None:
            watch.opened()
        reason, adapter = "error", lora_name_of(lora_request) or "base"
        choices: list[_FakeChoice] = []
        text = prompt if isinstance(prompt, str) else None
        try:
            choices = [
                _FakeChoice(prompt_ids, sampling_params, index, adapter, self.answer)
                for index in range(sampling_params.n)
            ]
            while not all(choice.finish_reason for choice in choices):
                await self._pause(choices[0].num_tokens)
                outputs = [choice.advance(self.tokens_per_output) for choice in choices]
                finished = all(choice.finish_reason for choice in choices)
                yield RequestOutput(
                    request_id,
                    text,
                    prompt_ids,
                    outputs,
                    finished,
                    lora_request,
                    _prompt_logprobs(prompt_ids, sampling_params),
                )
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            reason = "abort"
            raise
        finally:
            self.num_open -= 1
            if watch is not None:
                outputs = [choice.end(reason) for choice in choices]
                watch.ended(RequestOutput(request_id, text, prompt_ids, outputs, True, lora_request))

    async def _pause(self, num_tokens: int) -> None:
        await asyncio.sleep(0)
        if self.fail_after_tokens is not None and num_tokens >= self.fail_after_tokens:
            error = CorunError("the step fell over")
            error.timing = TIMING
            raise error
        held_at = 1 if self.hold_after_first else 0
        # The reader has written all earlier output when it asks for more.
        self.num_continued += num_tokens > 0
        while num_tokens >= held_at and self.held.is_set() and not self._dies_loudly():
            await asyncio.sleep(0.005)
        if self._dies_loudly():
            raise EngineDeadError(str(self.error))

    def _dies_loudly(self) -> bool:
        return self.error is not None and not self.dies_silently


def _prompt_logprobs(prompt_ids: list[int], params: SamplingParams) -> list[TokenCandidates | None] | None:
    """The first token has none."""
    if params.prompt_logprobs is None:
        return None
    return [None, *({one: Logprob(-0.5, 3, chr(one))} for one in prompt_ids[1:])]


# Of each request: the parts add up.
TIMING = EngineTiming({"kv_memory": 0.5, "compute": 0.25}, 50, 0, 2, 1)


class _FakeChoice:
    """One choice on its way to its last token."""

    def __init__(
        self, prompt_ids: list[int], params: SamplingParams, index: int, adapter: str, answer: str | None
    ) -> None:
        prompt = "".join(map(chr, prompt_ids))
        room = MAX_MODEL_LEN - len(prompt_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        text = expected_text(prompt, limit, adapter=adapter, choice=index)
        if answer is not None:
            text = answer[:limit]
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        self._stop = min(found)[1] if found else None
        self._ends = bool(found) or (answer is not None and len(answer) < limit)
        self._text = text[: min(found)[0]] if found else text
        self._params = params
        self._index = index
        self._start = AdapterStart("assisted", "told to") if adapter == "digits" else None
        self._history = ChoiceHistory(logprobs=None if params.logprobs is None else [])
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def end(self, reason: str) -> CompletionOutput:
        """The whole output at the end, with this reason unless it has ended by itself."""
        self.finish_reason = self.finish_reason or reason
        return self._output("")

    def advance(self, num_tokens: int) -> CompletionOutput:
        new = self._text[self.num_tokens : self.num_tokens + num_tokens]
        self.num_tokens += len(new)
        self._history.token_ids.extend(map(ord, new))
        self._history.pieces.extend(new)
        if self._history.logprobs is not None:
            self._history.logprobs.extend(map(self._candidates, new))
        if self.num_tokens == len(self._text):
            self.finish_reason = "stop" if self._ends else "length"
        return self._output(new)

    def _output(self, new: str) -> CompletionOutput:
        logprobs = list(map(self._candidates, new))
        return CompletionOutput(
            index=self._index,
            new_text=new,
            new_token_ids=list(map(ord, new)),
            new_logprobs=None if self._params.logprobs is None else logprobs,
            cumulative_logprob=None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop if self.finish_reason else None,
            history=self._history,
            num_pieces=self.num_tokens,
            num_tokens=self.num_tokens,
            adapter_start=self._start,
            timing=TIMING,
        )

    def _candidates(self, character: str) -> dict[int, Logprob]:
        """The drawn token has rank 2; a part of a character is among the others."""
        candidates = {ord(character): Logprob(-0.75, 2, character)}
        others = [Logprob(-0.25, 1, "bytes:\\xe2\\x82"), Logprob(-2.0, 3, "zz")]
        wanted = [other for other in others if other.rank <= (self._params.logprobs or 0)]
        return candidates | {-other.rank: other for other in wanted}


def make_adapter(
    name: str,
    *,
    path: str | None = None,
    state: str = "ready",
    reason: str | None = None,
    rank: int = 8,
    level: str = "device",
) -> AdapterInfo:
    """Return an adapter as the engine reports it."""
    return AdapterInfo(
        name=name,
        path=path or f"/adapters/{name}",
        state=state,
        reason=reason,
        rank=rank,
        num_bytes=1 << 20,
        version="0123abcd",
        residency=Residency(level=level),
    )
