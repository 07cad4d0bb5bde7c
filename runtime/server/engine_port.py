"""The part of an engine that the HTTP server uses.

``AsyncEngine`` satisfies ``EnginePort``; so does the fake of the tests. The server knows nothing
of processes, tensors or the scheduler.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..engine.heartbeat import HangWatch
from ..engine.messages import EngineStats, MachineReport, ModelInfo
from ..frontend.engine_watch import EngineWatches
from ..frontend.inputs import LoraDirectory, MadePrompt
from ..frontend.outputs import LoRARequest, RequestOutput, RequestWatch
from ..limits import TextLimit
from ..sampling import SamplingParams


class RendererPort(Protocol):
    """A chat template."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render a conversation. Raises ``RequestError`` if the template refuses it."""
        ...


class TokenizerPort(RendererPort, Protocol):
    """Text to tokens and back, and the model's chat template."""

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit | None = None
    ) -> list[int]:
        """Return the tokens of ``text`` without blocking the event loop.

        Raises the error of ``limit``, if there is one, and ``OverloadedError``.
        """
        ...

    @property
    def mark_ids(self) -> Mapping[str, int]:
        """The ids of added tokens that no free text of a grammar matches, by their texts."""
        ...

    def hides(self, text: str) -> bool:
        """Whether ``skip_special_tokens`` removes a part of ``text``."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``."""
        ...

    async def decode_async(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, with special tokens, beside the event loop."""
        ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token's text, beside the event loop."""
        ...

    def token_text(self, token_id: int) -> str: ...


class ConventionsPort(RendererPort, Protocol):
    """The chat template of an adapter or the base model, and its tokenizer."""

    def templates(self) -> list[tuple[str | None, str | None]]:
        """Return the templates of answers and of conversations, the adapter's before the base's."""
        ...

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, including the tokens that the adapter adds."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens, if it differs from the base's."""
        ...


class EnginePort(Protocol):
    """An engine that is ready. All its errors are classes of ``runtime/errors.py``."""

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, with the chat template."""
        ...

    async def conventions_of(self, lora: str | LoRAMix | None) -> ConventionsPort:
        """Return the conventions of an adapter; None = the base model."""
        ...

    def generate(
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
        """Yield the new output at each iteration, until all choices have ended.

        Closing the generator aborts them; ``watch`` is notified when they have ended in the engine.
        """
        ...

    def get_model_info(self) -> ModelInfo:
        """Return name, device and limits."""
        ...

    def get_stats(self) -> EngineStats:
        """Return the latest gauges and totals."""
        ...

    @property
    def stats_age_s(self) -> float:
        """Seconds since the engine last published statistics and changes of adapters."""
        ...

    async def refresh_stats(self, timeout_s: float) -> EngineStats:
        """Return current gauges and totals; the latest known if the engine takes too long."""
        ...

    def ask_stats(self) -> None:
        """Ask the engine to publish its statistics soon."""
        ...

    @property
    def num_requests_received(self) -> int:
        """Number of requests that the engine had received at its last statistics."""
        ...

    async def refresh_machine(self, timeout_s: float) -> MachineReport:
        """Return the machine's latency model; the last known if the engine takes too long."""
        ...

    @property
    def num_heartbeats(self) -> int:
        """Heartbeats of the engine's process, which continue while a step computes."""
        ...

    @property
    def hang_watch(self) -> HangWatch:
        """Says whether the engine makes progress (--engine-hang-s)."""
        ...

    @property
    def watches(self) -> EngineWatches:
        """Watches that are notified of requests sent and of changes that the engine publishes."""
        ...

    @property
    def loras(self) -> LoraDirectory:
        """The known adapters, by name."""
        ...

    async def find_lora(self, lora_name: str) -> None:
        """Register the adapter that a resolver finds for an unknown name."""
        ...

    def list_loras(self) -> Sequence[AdapterInfo]:
        """Return all registered adapters, in any state."""
        ...

    async def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        reload: bool = False,
        pinned: bool | None = None,
        replace: bool = True,
    ) -> None:
        """Register an adapter and wait until it is ready.

        Raises ``AdapterError``; unless ``replace``, ``AdapterExistsError`` for other content.
        """
        ...

    async def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None:
        """Pin an adapter to the device, or unpin it. Raises ``RequestError``."""
        ...

    async def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter; its running requests finish."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The reason of the engine's death; None while it is alive."""
        ...

    async def wait_dead(self) -> BaseException:
        """Wait for the engine's death; return its reason."""
        ...
