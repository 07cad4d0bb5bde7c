"""Cold adapters by streams and copies, as on CUDA: equal to PEFT under failures of streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from corun.gpu.coexec import handover, host_handover
from corun.gpu.coexec.handover import AddByCopy, Exchange, Handover, StreamHandover
from corun.gpu.coexec.invocation import Invocation
from corun.gpu.device.base import Stream
from corun.gpu.device.host_memory import TorchDevice
from corun.gpu.lora.adapter_layout import GroupKey
from support.cold_engine import ColdEngine
from support.cold_parity import NUM_LAYERS, PARTIAL_SPECS, check, make_case, prompts, split_at
from support.parity import ADAPTER_SPECS, ParityCase


@contextmanager
def exchanged_by_streams() -> Iterator[None]:
    """For engines that are built inside."""

    def apart(device: TorchDevice, compute: Stream, transfer: Stream) -> Exchange:
        assert transfer == compute, "they are apart already"
        return Exchange(device, compute, device.stream("exchange", is_urgent=True))

    def by_streams(exchange: Exchange, where: torch.device, *, max_tokens: int, max_columns: int) -> Handover:
        return StreamHandover(exchange, AddByCopy(max_tokens, max_columns, where))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "Exchange", apart)
        patch.setattr(host_handover, "make_handover", by_streams)
        yield


SPECS = (*PARTIAL_SPECS, ADAPTER_SPECS[0])
WARM = ADAPTER_SPECS[0].name


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"), SPECS)


@pytest.fixture(scope="module")
def running(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ColdEngine]:
    with (
        exchanged_by_streams(),
        ColdEngine(
            case.directory, case.adapters, tmp_path_factory.mktemp("engine"), delta_backend="numpy"
        ) as engine,
    ):
        assert isinstance(engine.assistant.handover, StreamHandover)
        yield engine


@pytest.fixture
def engine(running: ColdEngine) -> Iterator[ColdEngine]:
    """With one adapter on the device; no step may fail, and everything must be released."""
    running.warm(WARM)
    running.plans.clear()
    yield running
    running.check_nothing_is_held()
    assert running.core.stats().num_failed_steps == 0


def ask_all(engine: ColdEngine, seed: int) -> None:
    """Each cold adapter once, beside the warm one and the base."""
    names = [*(spec.name for spec in SPECS), None]
    for name, prompt in zip(names, prompts(len(names), seed=seed), strict=True):
        engine.ask(name, prompt)


@pytest.mark.parametrize("split_layer", [0, 2, NUM_LAYERS])
def test_targets_that_an_adapter_lacks(engine: ColdEngine, case: ParityCase, split_layer: int) -> None:
    with engine.chunks(split_at(split_layer, 20)):
        ask_all(engine, seed=30)
        answers = engine.run()
    assert (engine.num_assisted_rows > 0) == (split_layer > 0)
    assert engine.core.stats().num_retried_rows == 0
    check(case, answers)


class FailOnce:
    """An operation of a stream that fails in the middle of an assisted pass."""

    def __init__(self, device: TorchDevice, stream: Stream, key: GroupKey) -> None:
        self._device = device
        self._stream = stream
        self._key = key
        self.num_failures = 0

    def __call__(self, invocation: Invocation) -> None:
        if invocation.key == self._key and not self.num_failures:
            self.num_failures += 1
            self._device.launch(self._stream, self._fail)

    def _fail(self) -> None:
        raise ArithmeticError("on purpose")


@pytest.mark.parametrize("name", ["compute", "exchange"])
def test_a_failed_operation_voids_its_pass_and_no_other(
    engine: ColdEngine, case: ParityCase, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of the exchange are not raised at once: later operations are skipped."""
    exchange = engine.assistant.handover.exchange
    stream = {"compute": exchange.compute, "exchange": exchange.transfer}[name]
    fail = FailOnce(engine.parts.loaded.device, stream, (1, 0))
    before = engine.core.stats().num_retried_rows
    with engine.watched_sends(fail), engine.chunks(split_at(NUM_LAYERS, 8)):
        ask_all(engine, seed=31)
        answers = engine.run()
    assert fail.num_failures == 1
    num_warm, num_cold = 2, len(PARTIAL_SPECS)
    num_lost = {"compute": num_warm + num_cold, "exchange": num_cold}[name]
    assert engine.core.stats().num_retried_rows == before + num_lost
    check(case, answers)
    caplog.clear()  # a record of what failed keeps its frames, and these views of the rows
