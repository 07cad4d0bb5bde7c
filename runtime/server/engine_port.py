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
    """A chat template; see ``Conventions``."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str: ...


class TokenizerPort(RendererPort, Protocol):
    """Text to tokens and back, and the model's chat template; see ``Tokenizer``."""

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, limit: TextLimit | None = None
    ) -> list[int]: ...

    @property
    def mark_ids(self) -> Mapping[str, int]: ...

    def hides(self, text: str) -> bool: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    async def decode_async(self, token_ids: Sequence[int]) -> str: ...

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]: ...

    def token_text(self, token_id: int) -> str: ...


class ConventionsPort(RendererPort, Protocol):
    """The chat template of an adapter or the base model, and its tokenizer; see ``Conventions``."""

    def templates(self) -> list[tuple[str | None, str | None]]: ...

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, including the tokens that the adapter adds."""

    @property
    def vocab_size(self) -> int | None: ...


class EnginePort(Protocol):
    """An engine that is ready; see ``AsyncEngine``. Its errors are classes of ``runtime/errors.py``."""

    @property
    def tokenizer(self) -> TokenizerPort: ...

    async def conventions_of(self, lora: str | LoRAMix | None) -> ConventionsPort: ...

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
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def get_model_info(self) -> ModelInfo: ...

    def get_stats(self) -> EngineStats: ...

    @property
    def stats_age_s(self) -> float: ...

    async def refresh_stats(self, timeout_s: float) -> EngineStats: ...

    def ask_stats(self) -> None: ...

    @property
    def num_requests_received(self) -> int: ...

    async def refresh_machine(self, timeout_s: float) -> MachineReport: ...

    @property
    def num_heartbeats(self) -> int: ...

    @property
    def hang_watch(self) -> HangWatch: ...

    @property
    def watches(self) -> EngineWatches:
        """Watches that are notified of requests sent and of changes that the engine publishes."""

    @property
    def loras(self) -> LoraDirectory: ...

    async def find_lora(self, lora_name: str) -> None: ...

    def list_loras(self) -> Sequence[AdapterInfo]: ...

    async def add_lora(
        self,
        lora_request: LoRARequest,
        *,
        reload: bool = False,
        pinned: bool | None = None,
        replace: bool = True,
    ) -> None: ...

    async def pin_lora(self, lora_name: str, *, pinned: bool = True) -> None: ...

    async def remove_lora(self, lora_name: str) -> None: ...

    @property
    def error(self) -> BaseException | None: ...

    async def wait_dead(self) -> BaseException: ...
