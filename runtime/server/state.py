"""The state that all endpoints of one server share: its engine and the open requests."""

from dataclasses import dataclass, field, replace

from ..adapters.mix import LoRAMix
from ..errors import EngineDeadError, EngineHungError
from .body import BodyRoom
from .engine_port import EnginePort
from .errors import SHUTTING_DOWN, HttpError
from .fields import UnknownFields
from .gateways import GatewayLedger
from .metrics import ServerMetrics
from .model_names import ModelNames, ResolvedModel
from .open_requests import OpenRequests
from .request_log import RequestLog
from .request_records import HttpRequestRecord
from .settings import AppSettings


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
            raise HttpError(
                400,
                f"lora is given, but model names the adapter {model!r}; name it in lora, and the "
                f"base ({self.names.base}) as model",
                code="invalid_value",
                param="lora",
            )
        return replace(found, adapter=mix)

    def on_record(self, record: HttpRequestRecord) -> None:
        """Count and log a request that generates, at its end."""
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
