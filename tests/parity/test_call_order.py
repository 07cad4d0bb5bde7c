"""Cold adapters of a model that calls its modules in another order than it defines them."""

from pathlib import Path
from typing import Any

from support.cold_engine import ColdEngine
from support.cold_parity import check, prompts, split_at
from support.model_profiles import Figures
from support.parity import AdapterSpec, ParityCase


def test_workers_follow_the_calls(tmp_path: Path) -> None:
    """The attention of Phi-3 defines its output projection before the one that it calls first."""
    case = ParityCase("phi3", tmp_path / "case", specs=(AdapterSpec("all", {"r": 8}),))
    options: dict[str, Any] = {"figures": Figures(link_bytes_per_s=1e6), "delta_backend": "numpy"}
    with ColdEngine(case.directory, case.adapters, tmp_path / "engine", **options) as engine:
        with engine.chunks(split_at(2)):
            for prompt in prompts(2):
                engine.ask("all", prompt)
            answers = engine.run()
        assert engine.num_assisted_rows
        check(case, answers)
