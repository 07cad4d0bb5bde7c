"""What the HTTP server needs of an engine, and nothing more.

``AsyncEngine`` satisfies ``EnginePort``; so does the fake of the tests. The server knows nothing
of processes, tensors or the scheduler.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from ..adapters.info import AdapterInfo
from ..engine.messages import EngineStats, ModelInfo
from ..frontend.lora_directory import LoraDirectory
from ..frontend.outputs import LoRARequest, RequestOutput
from ..sampling import SamplingParams


class TokenizerPort(Protocol):
    """Text to tokens and back, and the model's chat template."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """Render a conversation. Raises ``RequestError`` if the template refuses it."""
        ...

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text`` without holding up the event loop."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``."""
        ...


class EnginePort(Protocol):
    """An engine that is ready. All its errors are classes of ``runtime/errors.py``."""

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, with the chat template."""
        ...

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new whenever it is asked for, until all choices have ended.

        Closing the generator aborts them.
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
        """Seconds since the engine told them, and what is new of adapters."""
        ...

    async def refresh_stats(self, timeout_s: float) -> EngineStats:
        """Return current gauges and totals; the latest known if the engine takes too long."""
        ...

    @property
    def loras(self) -> LoraDirectory:
        """What is known of adapters: their names are resolved there."""
        ...

    def list_loras(self) -> Sequence[AdapterInfo]:
        """Return all registered adapters, in whatever state."""
        ...

    async def add_lora(
        self, lora_request: LoRARequest, *, reload: bool = False, pinned: bool | None = None
    ) -> None:
        """Register an adapter and wait until it is ready. Raises ``AdapterError``."""
        ...

    async def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None:
        """Keep an adapter on the device, or no longer. Raises ``RequestError``."""
        ...

    async def remove_lora(self, lora_name: str) -> None:
        """Unregister an adapter; requests that run under it finish."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why the engine is dead; None while it lives."""
        ...

    async def wait_dead(self) -> BaseException:
        """Return, once the engine has died, why."""
        ...
