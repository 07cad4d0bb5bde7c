"""The state of one gateway, which its endpoints share."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...adapters.names import unknown_name
from ...server.answers import ModelCard
from ...server.body import BodyRoom
from ...server.errors import SHUTTING_DOWN, HttpError
from ...server.open_requests import OpenRequests
from ...server.settings import AppSettings
from ...server.state import ModelNames
from ..policy.reports import RouteRequest, ServerId
from ..wire import AdapterEntry
from .bodies import BodyFacts
from .counts import GatewayCounts
from .links import EngineLink
from .load_before_route import LoadBeforeRoute
from .routing import Routing
from .samples import TokenSamples
from .table import KnownTable

_MAX_NAME_CHARS = 48  # of an id; engines accept ids of up to 64


def gateway_id_of(name: str) -> str:
    """Return a unique id: engines count requests by gateway."""
    plain = "".join(one if one.isascii() and one.isalnum() else "-" for one in name)
    return f"{plain[-_MAX_NAME_CHARS:]}-{secrets.token_hex(4)}"


@dataclass(slots=True, kw_only=True)
class GatewayState:
    """State of a gateway. On one event loop."""

    gateway_id: str
    cluster_key: str
    settings: AppSettings
    routing: Routing
    load_before_route: LoadBeforeRoute
    samples: TokenSamples
    table: KnownTable = field(default_factory=KnownTable)
    links: dict[str, EngineLink] = field(default_factory=dict)  # of engines in the table
    counts: GatewayCounts = field(default_factory=GatewayCounts)
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    body_room: BodyRoom = field(init=False)
    draining: bool = False
    is_connected: bool = False

    def __post_init__(self) -> None:
        self.body_room = BodyRoom(self.settings.limits.max_bodies_bytes)

    def check_accepting(self) -> None:
        """Raise ``HttpError`` unless new requests are served."""
        if self.draining:
            raise HttpError(503, "the gateway is shutting down", code=SHUTTING_DOWN)
        if not self.table.sequence:
            raise none_ready("the controller has not listed any yet")

    def check_ready(self) -> None:
        """Raise ``HttpError`` unless an engine is ready."""
        self.check_accepting()
        if not any(link.is_usable for link in self.links.values()):
            raise none_ready(self.why_none())

    def base_cards(self) -> Sequence[ModelCard]:
        """The base model's names, as a connected engine reports them."""
        return next((link.base_cards for link in self.links.values() if link.base_cards), ())

    def adapter_meant(self, model: str | None) -> AdapterEntry | None:
        """Return the adapter that a request names; None = the base model.

        Raises ``UnknownModelError`` or ``AdapterUnavailableError``.
        """
        base_names = [card.id for card in self.base_cards()]
        if not base_names:
            if model is None:
                return None
            raise none_ready(self.why_none())
        name = ModelNames(base_names).adapter_meant(model, self.table.adapters)
        if model is None or name is None:
            return None
        return self.table.usable(name, model, base_names)

    def adapters_meant(self, facts: BodyFacts) -> tuple[AdapterEntry, ...]:
        """Return the adapters of a request, those with the highest ranks first.

        Raises ``UnknownModelError`` or ``AdapterUnavailableError``.
        """
        entry = self.adapter_meant(facts.model)
        if entry is not None:
            return (entry,)
        entries = [
            self.table.usable(name, name, (), param="lora") for name in dict.fromkeys(facts.lora or ())
        ]
        return tuple(sorted(entries, key=lambda one: -one.rank))

    def choose(self, route: RouteRequest, tried: set[ServerId]) -> EngineLink | None:
        """Return the best engine that was not tried; None = there is none."""
        started_s = time.perf_counter()
        order = self.routing.rank(route)
        self.counts.decision_s.observe(time.perf_counter() - started_s)
        for server_id in order:
            link = self.links.get(server_id)
            if link is not None and link.is_usable and server_id not in tried:
                return link
        return None

    def why_none(self) -> str:
        """Return the reason of each engine that gets no requests."""
        if not self.links:
            return "there is none"
        return "; ".join(f"{engine_id} {_why(link)}" for engine_id, link in self.links.items())

    def ejected(self) -> dict[str, str]:
        causes = {one: link.health.ejected_for for one, link in self.links.items()}
        return {engine_id: cause for engine_id, cause in causes.items() if cause is not None}

    def unknown_adapter(self, name: str, param: str) -> Exception:
        """Return the error for a name that is not in the table."""
        return unknown_name(name, list(self.table.adapters), param=param)


def none_ready(why: str) -> HttpError:
    """Return the error of a request that no engine can take."""
    return HttpError(503, f"no engine is ready: {why}", code="no_engine_ready")


def _why(link: EngineLink) -> str:
    if link.health.ejected_for is not None:
        return f"is ejected ({link.health.ejected_for})"
    return "drains" if not link.is_usable else "is ready"
