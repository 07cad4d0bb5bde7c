"""Cold adapters are computed right by workers of every back end, and by several on one core."""

import pytest
from support.cold_engine import ColdEngine
from support.cold_parity import NAMES, NUM_LAYERS, check, make_case, prompts, split_at
from support.parity import ParityCase


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> ParityCase:
    return make_case(tmp_path_factory.mktemp("deep"))


@pytest.mark.parametrize(
    ("delta_backend", "num_workers"),
    [pytest.param("numpy", 3, marks=pytest.mark.full), ("torch", 1), ("numba", 2)],
)
def test_every_back_end_and_more_workers_than_cores(
    case: ParityCase, tmp_path_factory: pytest.TempPathFactory, delta_backend: str, num_workers: int
) -> None:
    """Slices of 8 tokens, so that rows are cut over workers and workers have several rows."""
    with ColdEngine(
        case.directory,
        case.adapters,
        tmp_path_factory.mktemp("engine"),
        num_workers=num_workers,
        delta_backend=delta_backend,
    ) as engine:
        assert len(engine.processes) == 1 + num_workers
        with engine.held_loads(), engine.chunks(split_at(NUM_LAYERS)):
            for name, prompt in zip(NAMES, prompts(len(NAMES), seed=6), strict=True):
                engine.ask(name, prompt)
            engine.run_until(lambda: all(a.finish_reason for a in engine.answers.values()))
            engine.release_loads()
            answers = engine.run()
        check(case, answers)
        assert engine.core.stats().num_retried_rows == 0
        engine.check_nothing_is_held()
