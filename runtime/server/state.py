"""What all endpoints of one server share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import EngineDeadError
from .engine_port import EnginePort
from .errors import SHUTTING_DOWN, HttpError
from .lifecycle import OpenRequests
from .metrics import MetricLabels, ServerMetrics
from .model_names import ModelNames, ResolvedModel

DEFAULT_MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Configuration of the HTTP application; the engine's facts come from the engine."""

    served_names: Sequence[str] = ()  # of the base model; empty = the name that it has itself
    api_key: str | None = None
    metrics_prefix: str = "corun"
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    allow_lora_updates: bool = False
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    version: str = "unknown"


@dataclass(slots=True)
class ServerState:
    """One engine behind one application."""

    engine: EnginePort
    settings: AppSettings
    names: ModelNames
    metrics: ServerMetrics
    created_s: int  # Unix time, for /v1/models
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    draining: bool = False  # no new requests; those that run may finish

    def resolve(self, model: str | None) -> ResolvedModel:
        """Return what ``model`` stands for now."""
        return self.names.resolve(model, self.engine.loras)

    def check_accepting(self) -> None:
        """Raise unless new requests are served."""
        error = self.engine.error
        if error is not None:
            raise EngineDeadError(f"the engine is dead: {error}")
        if self.draining:
            raise HttpError(503, "the server is shutting down", code=SHUTTING_DOWN)


def make_state(engine: EnginePort, settings: AppSettings, *, now_s: int) -> ServerState:
    """Build the state for an engine that is ready."""
    names = ModelNames(tuple(settings.served_names) or (engine.get_model_info().name,))
    labels = MetricLabels(
        prefix=settings.metrics_prefix,
        model_name=names.base,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
    )
    metrics = ServerMetrics(engine, labels)
    return ServerState(engine, settings, names, metrics, now_s)
