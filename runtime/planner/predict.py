"""Predicts what each strategy comes to, by running the chunks of one request in thought. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...profiles.models import MachineModel
from .cold import ColdRequest, layer_times
from .split import LayerTimes, Split, choose_split, end_of
from .strategy import LoadStrategy, Prediction


def predict(model: MachineModel, request: ColdRequest, strategy: LoadStrategy) -> Prediction:
    """First and second token of ``request`` under ``strategy``, and what it costs the others."""
    loaded_s = max(request.ready_s, default=0.0)
    waits_first = strategy in {LoadStrategy.BLOCKING, LoadStrategy.ASYNC_LOAD}
    run = _Run(model, request, strategy, now_s=loaded_s if waits_first else 0.0)
    for num_tokens in _chunks(request):
        run.chunk(num_tokens)
    first_token_s = run.now_s
    run.between_chunks()
    run.chunk(1)
    return Prediction(
        strategy=strategy,
        first_token_s=first_token_s,
        second_token_s=run.now_s,
        stall_s=run.stall_s + (loaded_s if strategy is LoadStrategy.BLOCKING else 0.0),
        split_layer=run.first_split_layer or 0,
    )


def split_chunk(
    model: MachineModel, request: ColdRequest, num_tokens: int, strategy: LoadStrategy
) -> Split:
    """The split of the next chunk, of ``num_tokens``."""
    times = layer_times(model, request.adapter, num_tokens, request.ready_s, request.num_workers)
    return _split(times, strategy)


@dataclass(slots=True)
class _Run:
    """One request's chunks, one after the other, with the others' steps in between."""

    model: MachineModel
    request: ColdRequest
    strategy: LoadStrategy
    now_s: float
    stall_s: float = 0.0
    first_split_layer: int | None = None

    def chunk(self, num_tokens: int) -> None:
        """Compute one chunk."""
        request = self.request
        if self.first_split_layer is not None and num_tokens > 1:
            self.between_chunks()
        ready_s = tuple(max(0.0, ready - self.now_s) for ready in request.ready_s)
        times = layer_times(self.model, request.adapter, num_tokens, ready_s, request.num_workers)
        split = _split(times, self.strategy)
        if self.first_split_layer is None:
            self.first_split_layer = split.layer
        self.now_s += split.end_s
        self.stall_s += split.end_s - sum(times.device_s)

    def between_chunks(self) -> None:
        """The running requests have their step."""
        if self.request.num_running:
            self.now_s += self.request.running_step_s


def _split(times: LayerTimes, strategy: LoadStrategy) -> Split:
    """Only the assisted strategy gives layers to the workers."""
    if strategy is LoadStrategy.ASSISTED:
        return choose_split(times)
    return Split(0, end_of(times, 0))


def _chunks(request: ColdRequest) -> Iterator[int]:
    left = request.num_tokens
    while left > 0:
        num_tokens = min(left, request.max_chunk_tokens)
        yield num_tokens
        left -= num_tokens
