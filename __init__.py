"""corun: many LoRA adapters over one base LLM, on the accelerator and the CPU beside it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime.adapters.mix import LoRAMix
    from .runtime.config.engine import EngineConfig
    from .runtime.errors import (
        AdapterChangedError,
        AdapterError,
        AdapterExistsError,
        AdapterFailedError,
        AdapterUnavailableError,
        AdminKeyNeededError,
        ConfigError,
        ContextLengthError,
        CorunError,
        EngineDeadError,
        EngineHungError,
        InvalidKeyError,
        ModelError,
        NotServedError,
        OverloadedError,
        RequestError,
        ResourceError,
        StepFailedError,
        TooManySequencesError,
        UnknownModelError,
    )
    from .runtime.frontend.async_engine import AsyncEngine
    from .runtime.frontend.engine import Engine
    from .runtime.frontend.lora_resolvers import LoraResolver
    from .runtime.frontend.outputs import CompletionOutput, Logprob, LoRARequest, RequestOutput
    from .runtime.memory.grant import Verdict
    from .runtime.request import Request
    from .runtime.sampling import SamplingParams, StructuredOutput
    from .runtime.scheduler.policy import PolicyFacts, SchedulerPolicy

__version__ = "0.2.0"

__all__ = [
    "AdapterChangedError",
    "AdapterError",
    "AdapterExistsError",
    "AdapterFailedError",
    "AdapterUnavailableError",
    "AdminKeyNeededError",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "CorunError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineHungError",
    "InvalidKeyError",
    "LoRAMix",
    "LoRARequest",
    "Logprob",
    "LoraResolver",
    "ModelError",
    "NotServedError",
    "OverloadedError",
    "PolicyFacts",
    "Request",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "SchedulerPolicy",
    "StepFailedError",
    "StructuredOutput",
    "TooManySequencesError",
    "UnknownModelError",
    "Verdict",
    "__version__",
]

# A name is imported when it is first used, so that ``import corun`` loads nothing heavy.
_MODULES = {
    "Engine": ".runtime.frontend.engine",
    "AsyncEngine": ".runtime.frontend.async_engine",
    "EngineConfig": ".runtime.config.engine",
    "SamplingParams": ".runtime.sampling",
    "StructuredOutput": ".runtime.sampling",
    "LoRAMix": ".runtime.adapters.mix",
    "LoRARequest": ".runtime.frontend.outputs",
    "LoraResolver": ".runtime.frontend.lora_resolvers",
    "Logprob": ".runtime.frontend.outputs",
    "CompletionOutput": ".runtime.frontend.outputs",
    "RequestOutput": ".runtime.frontend.outputs",
    "SchedulerPolicy": ".runtime.scheduler.policy",
    "PolicyFacts": ".runtime.scheduler.policy",
    "Verdict": ".runtime.memory.grant",
    "Request": ".runtime.request",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES.get(name, ".runtime.errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported yet or not."""
    return sorted({*globals(), *__all__})
