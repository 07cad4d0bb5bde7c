"""The state that all endpoints share: the engine, names of models, and open requests."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

from ..adapters.info import AdapterInfo
from ..adapters.mix import LoRAMix
from ..adapters.names import LOADING, READY, unknown_name
from ..errors import EngineDeadError, EngineHungError
from ..frontend.inputs import LoraDirectory
from .body import BodyRoom
from .engine_port import EnginePort
from .errors import SHUTTING_DOWN, HttpError, InvalidValueError
from .fields import UnknownFields
from .metrics import ServerMetrics
from .open_requests import GatewayLedger, OpenRequests
from .request_log import RequestLog
from .request_records import HttpRequestRecord
from .settings import AppSettings


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model that a request names."""

    shown_name: str  # echoed in the answer
    adapter: str | LoRAMix | None  # None = the base model


class ModelNames:
    """The names over HTTP: the base model's served names, and the adapters'."""

    def __init__(self, base_names: Sequence[str]) -> None:
        assert base_names
        self.base_names = tuple(base_names)

    @property
    def base(self) -> str:
        """The first served name: the base model's id."""
        return self.base_names[0]

    def resolve(self, model: str | None, loras: LoraDirectory) -> ResolvedModel:
        """Return the model that ``model`` names; None = the base model.

        Raises ``UnknownModelError`` with near names, or ``AdapterUnavailableError`` with the
        reason for an adapter that failed to load or is being removed.
        """
        meant = self.adapter_meant(model, loras)
        if model is None or meant is None:
            return ResolvedModel(self.base if model is None else model, None)
        if meant not in loras:
            known = [*self.base_names, *(info.name for info in loras.list())]
            raise unknown_name(model, known, meant=meant)
        loras.check_usable(meant)
        return ResolvedModel(model, meant)

    def adapter_meant(self, model: str | None, loras: Container[str]) -> str | None:
        """Return the adapter that ``model`` names, known or not; None = the base model."""
        if model is None or model in self.base_names:
            return None
        return model if model in loras else self._without_base(model)

    def _without_base(self, model: str) -> str:
        for base in self.base_names:
            if model.startswith(base + ":"):
                return model[len(base) + 1 :]
        return model


def is_listed(adapter: AdapterInfo) -> bool:
    """Whether ``/v1/models`` shows the adapter: a client that picks it gets an answer."""
    return adapter.state in (READY, LOADING)


@dataclass(slots=True)
class ServerState:
    """One engine behind one application."""

    engine: EnginePort
    settings: AppSettings
    names: ModelNames
    metrics: ServerMetrics
    unknown_fields: UnknownFields
    body_room: BodyRoom
    created_s: int  # Unix time, for /v1/models
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    gateways: GatewayLedger = field(default_factory=GatewayLedger)
    draining: bool = False  # no new requests; running ones may finish
    is_ending: bool = False  # streams without an end of their own end now
    request_log: RequestLog | None = None

    async def resolve(self, model: str | None, mix: LoRAMix | None = None) -> ResolvedModel:
        """Return the model that ``model`` names; resolvers look for unknown names.

        With ``mix``, which the engine resolves, it must be the base. Raises ``RequestError``.
        """
        meant = self.names.adapter_meant(model, self.engine.loras)
        if meant is not None:
            await self.engine.find_lora(meant)
        found = self.names.resolve(model, self.engine.loras)
        if mix is None:
            return found
        if found.adapter is not None:
            raise InvalidValueError(
                f"lora is given, but model names the adapter {model!r}; name it in lora, and the "
                f"base ({self.names.base}) as model",
                param="lora",
            )
        return replace(found, adapter=mix)

    def on_record(self, record: HttpRequestRecord) -> None:
        self.metrics.ended(record)
        if self.request_log is not None:
            self.request_log.write(record)

    def check_accepting(self) -> None:
        """Raise unless new requests are accepted."""
        error = self.engine.error
        if error is not None:
            raise EngineDeadError(f"the engine is dead: {error}")
        if self.draining:
            raise HttpError(503, "the server is shutting down", code=SHUTTING_DOWN)

    @property
    def is_ready(self) -> bool:
        """Whether new requests should be sent here."""
        engine = self.engine
        return engine.error is None and engine.hang_watch.reason is None and not self.draining

    def check_ready(self) -> None:
        """Raise unless new requests should be sent here: those to a hung engine have to wait."""
        self.check_accepting()
        reason = self.engine.hang_watch.reason
        if reason is not None:
            raise EngineHungError(reason)


def make_state(
    engine: EnginePort, settings: AppSettings, *, now_s: int, request_log: RequestLog | None = None
) -> ServerState:
    """Build the state for an engine that is ready."""
    settings = settings.of_model(engine.get_model_info())
    names = ModelNames(tuple(settings.served_names) or (engine.get_model_info().name,))
    unknown_fields = UnknownFields(settings.unknown_fields, settings.limits)
    metrics = ServerMetrics(engine, settings, names.base, unknown_fields)
    body_room = BodyRoom(settings.limits.max_bodies_bytes)
    state = ServerState(engine, settings, names, metrics, unknown_fields, body_room, now_s)
    state.request_log = request_log
    engine.watches.on_sent = state.gateways.sent
    return state
