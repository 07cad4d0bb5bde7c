"""Counts of a gateway."""

from collections import Counter
from dataclasses import dataclass, field

from ...server.families import FIRST_TOKEN_BOUNDS_S, Histogram

_DECISION_BOUNDS_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


@dataclass(slots=True)
class EngineCounts:
    """Counts of one engine, over restarts and absences."""

    num_requests: int = 0
    num_retried: int = 0  # that failed here and were sent to another engine
    num_ejections: Counter[str] = field(default_factory=Counter)  # by cause
    # Measured and predicted time to the first token of streams.
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    predicted_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    ratio: Histogram = field(default_factory=lambda: Histogram(_RATIO_BOUNDS))

    def first_token(self, measured_s: float, predicted_s: float) -> None:
        self.first_token_s.observe(measured_s)
        self.predicted_s.observe(predicted_s)
        if predicted_s > 0.0:
            self.ratio.observe(measured_s / predicted_s)


@dataclass(slots=True)
class GatewayCounts:
    """Counts of all requests."""

    http_requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    connections_ended: Counter[str] = field(default_factory=Counter)
    decision_s: Histogram = field(default_factory=lambda: Histogram(_DECISION_BOUNDS_S))
    engines: dict[str, EngineCounts] = field(default_factory=dict)
    num_lost: int = 0  # streams that ended by an error after their first byte
    # Since the last report to the controller, by adapter.
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    output_tokens: Counter[str] = field(default_factory=Counter)

    def answered(self, method: str, route: str, status: str, took_s: float) -> None:
        """Count an answered request. Durations are in the engines' metrics."""
        self.http_requests[method, route, status] += 1

    def of_engine(self, engine_id: str) -> EngineCounts:
        return self.engines.setdefault(engine_id, EngineCounts())

    def take_demand(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return and reset tokens of prompts and outputs by adapter."""
        taken = dict(self.prompt_tokens), dict(self.output_tokens)
        self.prompt_tokens.clear()
        self.output_tokens.clear()
        return taken
