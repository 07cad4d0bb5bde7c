"""Cold starts of adapters that must be read from files, with the real planner and made-up times."""

import pytest
from corun.cpu_workers.teams import JobModel
from corun.profiles.curve import Curve
from corun.profiles.models import GroupModel, LinkModel, LoraModel, MachineModel
from corun.runtime.adapter import AdapterFacts, AdapterLayers
from corun.runtime.coldstart.cold import EMPTY, AdapterShape, ColdRequest, layer_times
from corun.runtime.coldstart.cold_start import PlannedColdStarts
from corun.runtime.coldstart.planner import Planner, PlannerConfig
from corun.runtime.coldstart.predict import StepForecast, predict
from corun.runtime.coldstart.strategy import Decision, LoadStrategy
from corun.runtime.plan import AdapterId, RequestId
from corun.runtime.request import Request
from corun.runtime.scheduler.cold import ColdChunk, StepRows
from support.open_transfers import Loads
from support.scheduling import make_request

ADAPTER = AdapterId(1)
LAYERS = 4
GROUP_BYTES = 10_000_000  # 0.1 s of the first guess of how fast files are read
SHAPE = AdapterShape(LAYERS * GROUP_BYTES, ((8,),) * LAYERS)


def model(link_bytes_per_s: float) -> MachineModel:
    """4 ms per token and step, 0.2 ms per token and group for the workers."""
    curve = Curve((1.0, 101.0), (0.001, 0.101))
    return MachineModel(
        num_layers=LAYERS,
        step_s=Curve((1.0, 101.0), (0.004, 0.404)),
        groups=(GroupModel("q_proj", curve, 1 / 8),),
        invocation_s=0.00002,
        lora=LoraModel(0.0, 0.0, 0.0, 0.0),
        link=LinkModel(link_bytes_per_s, 0.0),
        num_workers=1,
        job=JobModel(s_per_product=0.0002),
    )


class Start:
    """A request of 32 tokens, 128 ms of work, with an adapter that is being read."""

    def __init__(self, link_bytes_per_s: float = 1e9, num_others: int = 0) -> None:
        self.planner = Planner(model(link_bytes_per_s), PlannerConfig())
        self.loads = Loads()
        self.cold_starts = PlannedColdStarts(self.planner, (0, 512), self.loads.table)
        self.num_others = num_others
        self.cold_starts.workers_changed(1)
        layers = AdapterLayers(SHAPE.rank_sums, (GROUP_BYTES,) * LAYERS, tuple(range(LAYERS)))
        facts = AdapterFacts("d", 8, SHAPE.num_bytes, layers=layers)
        self.request: Request = make_request(1, prompt=32, adapter_id=ADAPTER, adapter=facts)
        self.loads.begin(ADAPTER, layers.group_bytes, is_on_host=False, adapter=facts)
        assert self.cold_starts.may_start(self.request, num_others, StepRows(64, False), 0.0)

    @property
    def strategy(self) -> LoadStrategy:
        decision = self.cold_starts.decision(RequestId(1))
        assert decision is not None
        assert "its files must be read first" in decision.reason
        return decision.strategy

    def read(self, num_groups: int, now_s: float) -> None:
        news = self.loads.read(ADAPTER, num_groups, 0.1 * num_groups, now_s)
        self.cold_starts.files_read(*news)

    def chunk(self, now_s: float) -> ColdChunk | None:
        rows = StepRows(64, False)
        return self.cold_starts.next_chunk(self.request, 512, self.num_others, rows, now_s)


def test_it_begins_while_the_last_layer_is_read_and_no_sooner_than_is_of_use() -> None:
    start = Start()
    assert start.strategy is LoadStrategy.PIPELINED
    assert start.chunk(0.0) is None
    for num_groups, now_s in ((1, 0.1), (2, 0.2)):
        start.read(num_groups, now_s)
        assert start.chunk(now_s) is None, "it would end when the last layer is there anyway"
    start.read(3, 0.3)
    chunk = start.chunk(0.3)
    assert chunk is not None
    assert chunk.num_tokens == 32


def test_it_does_not_begin_while_the_disk_hangs() -> None:
    start = Start()
    start.read(2, 0.2)
    for now_s in (0.3, 1.0, 20.0):
        assert start.chunk(now_s) is None


def test_others_are_held_up_by_no_more_than_their_share() -> None:
    start = Start(num_others=3)
    assert start.strategy is LoadStrategy.PIPELINED
    start.read(3, 0.3)
    assert start.chunk(0.3) is None
    start.loads.arrived(ADAPTER, 3, 0.31)
    start.read(4, 0.4)
    assert start.chunk(0.4) is not None


def test_workers_begin_while_the_last_layer_is_read_and_no_sooner_than_is_of_use() -> None:
    """The link is slow, so workers help."""
    start = Start(link_bytes_per_s=1e7)
    assert start.strategy is LoadStrategy.ASSISTED
    for num_groups, now_s in ((1, 0.1), (2, 0.2)):
        start.read(num_groups, now_s)
        assert start.chunk(now_s) is None, "it would end when the last layer is there anyway"
    start.read(3, 0.3)
    chunk = start.chunk(0.3)
    assert chunk is not None
    assert chunk.split_layer == LAYERS


@pytest.mark.parametrize("num_read", range(LAYERS + 1))
def test_workers_wait_for_what_was_not_read(num_read: int) -> None:
    read_s = tuple(0.0 if layer < num_read else 1.0 for layer in range(LAYERS))
    cold = ColdRequest(32, SHAPE, (9.0,) * LAYERS, 512, num_workers=1, read_s=read_s)
    forecast = StepForecast(model(1.0), cold, 32, EMPTY, LoadStrategy.ASSISTED)
    in_time_s, step = forecast.at(1.0).end_s, forecast.at(0.0)
    assert step.split_layer == LAYERS
    late_s = (1.0 + (LAYERS - num_read) / LAYERS * in_time_s) if num_read < LAYERS else in_time_s
    assert step.end_s == pytest.approx(late_s)
    assert cold.after(0.25).read_s == tuple(0.75 * time_s for time_s in read_s)
    assert cold.after(8.0).ready_s == (1.0,) * LAYERS


@pytest.mark.parametrize("split_layer", range(LAYERS + 1))
def test_rows_wait_for_the_reads_and_loads_of_other_cold_rows(
    split_layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the split for its files, which workers need, and from there on for the link."""
    start, asked = Start(link_bytes_per_s=1e7), list[ColdRequest]()
    decide = Planner.decide

    def noted(planner: Planner, cold: ColdRequest) -> Decision:
        asked.append(cold)
        return decide(planner, cold)

    monkeypatch.setattr(Planner, "decide", noted)
    other = make_request(2, prompt=32, adapter_id=ADAPTER, adapter=start.request.adapter)
    rows = StepRows(64, False, cold_chunks=[(start.request, ColdChunk(8, split_layer))])
    assert start.cold_starts.may_start(other, 0, rows, 0.0)
    (cold,) = asked
    assert cold.read_s is not None
    expected_s = cold.read_s[:split_layer] + cold.ready_s[split_layer:]
    assert layer_times(start.planner.model, cold, 8, cold.co_scheduled).held_s == expected_s


def test_a_start_as_files_are_read_is_predicted_to_hold_nobody_up() -> None:
    times_s = (0.1, 0.2, 0.3, 0.4)
    cold = ColdRequest(32, SHAPE, times_s, 512, num_running=1, read_s=times_s)
    pipelined = predict(model(1e9), cold, LoadStrategy.PIPELINED)
    assert pipelined.stall_s == pytest.approx(0.0, abs=1e-9)
    assert pipelined.first_token_s == pytest.approx(0.4 + 0.032)
    waiting = predict(model(1e9), cold, LoadStrategy.ASYNC_LOAD)
    assert waiting.first_token_s == pytest.approx(0.4 + 0.128)


def test_how_fast_files_are_read_teaches_nothing_of_strategies() -> None:
    start = Start()
    cold = ColdRequest(32, SHAPE, (0.1,) * LAYERS, 512)
    before = start.planner.predict(cold, LoadStrategy.PIPELINED)
    told = start.cold_starts.on_first_token(RequestId(1), 9.0)
    assert told is not None
    assert told.strategy == "pipelined"
    assert start.planner.predict(cold, LoadStrategy.PIPELINED) == before
