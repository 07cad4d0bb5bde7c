"""What the HTTP server needs of an engine, and nothing more.

``AsyncEngine`` satisfies ``EnginePort``; so does the fake of the tests. The server knows nothing
of processes, tensors or the scheduler.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from ..adapters.info import AdapterInfo
from ..engine.messages import EngineStats, MachineReport, ModelInfo
from ..frontend.engine_watch import EngineWatches
from ..frontend.lora_directory import LoraDirectory
from ..frontend.outputs import LoRARequest, RequestOutput, RequestWatch
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

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text`` without holding up the event loop."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return one token's text."""
        ...


class ConventionsPort(RendererPort, Protocol):
    """The chat template of an adapter or the base, and the tokenizer that belongs to it."""

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, with the tokens that the adapter adds."""
        ...


class EnginePort(Protocol):
    """An engine that is ready. All its errors are classes of ``runtime/errors.py``."""

    @property
    def tokenizer(self) -> TokenizerPort:
        """The tokenizer, with the chat template."""
        ...

    async def conventions_of(self, lora: str | None) -> ConventionsPort:
        """Return what makes tokens of an adapter's conversations and texts; None = the base."""
        ...

    def generate(
        self,
        prompt: str | list[int] | Callable[[Any], Awaitable[list[int]]],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: str | None = None,
        cache_salt: str = "",
        predicted_output_tokens: int | None = None,
        add_special_tokens: bool = True,
        watch: RequestWatch | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new whenever it is asked for, until all choices have ended.

        Closing the generator aborts them; ``watch`` is told when they have ended in the engine.
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

    def ask_stats(self) -> None:
        """Have the engine tell them as soon as it gets to it."""
        ...

    @property
    def num_requests_received(self) -> int:
        """How many engine requests there had been when the engine told its statistics."""
        ...

    async def refresh_machine(self, timeout_s: float) -> MachineReport:
        """Return how long things take there; as told before if the engine takes too long."""
        ...

    @property
    def num_heartbeats(self) -> int:
        """Of the engine's process, which go on while a step computes."""
        ...

    @property
    def watches(self) -> EngineWatches:
        """Who is told of requests that were sent, and of what the engine tells of itself."""
        ...

    @property
    def loras(self) -> LoraDirectory:
        """What is known of adapters: their names are resolved there."""
        ...

    async def find_lora(self, lora_name: str) -> None:
        """Register what a resolver has under a name that is not known."""
        ...

    def list_loras(self) -> Sequence[AdapterInfo]:
        """Return all registered adapters, in whatever state."""
        ...

    async def add_lora(
        self, lora_request: LoRARequest, *, reload: bool = False, pinned: bool | None = None,
        replace: bool = True,
    ) -> None:  # fmt: skip
        """Register an adapter and wait until it is ready.

        Raises ``AdapterError``; unless ``replace``, ``AdapterExistsError`` for other content.
        """
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
