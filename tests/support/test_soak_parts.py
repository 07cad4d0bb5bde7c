"""The soak's load follows from its seed, and its judgement finds what grows and what slows down."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from corun.runtime.demo import demo_adapters_path
from safetensors.torch import load_file

from .adapter_files import WEIGHTS
from .soak_load import ANSWERS, Load, visits, write_adapter
from .soak_samples import MAX_GROWTH, Held, Relative, Sample, growth_rows

NUM_SAMPLES = 100
FIELDS = ("private_mib", "resident_mib", "proportional_mib", "descriptors", "threads")


def samples(what: str = "", values: list[float] | None = None) -> list[Sample]:
    """Samples of two processes that hold the same all the time, plus ``values`` of one figure."""
    made = []
    for number in range(NUM_SAMPLES):
        more = {what.lower().replace(" ", "_"): values[number]} if values else {}
        held: dict[str, Any] = {field: 100 + more.get(field, 0) for field in FIELDS}
        made.append(
            Sample(
                at_s=5.0 * number,
                processes={"server": Held(**held), "engine": Held(**dict.fromkeys(FIELDS, 200))},
                segments=int(2 + more.get("segments", 0)),
                shared_mib=30 + number % 7 + more.get("unaccounted_shared_mib", 0),
                adapters_mib=25 + number % 7,
            )
        )
    return made


def exceeded(found: list[Sample]) -> list[str]:
    return [row.what for row in growth_rows(found) if not row.is_met]


@pytest.mark.parametrize("what", MAX_GROWTH)
def test_what_grows_is_found(what: str) -> None:
    step = 4 * MAX_GROWTH[what] / NUM_SAMPLES
    assert exceeded(samples(what, [step * number for number in range(NUM_SAMPLES)])) == [what]


@pytest.mark.parametrize("what", MAX_GROWTH)
def test_what_is_taken_for_a_time_does_not_count(what: str) -> None:
    assert exceeded(samples()) == []
    raised = [100.0 * (number % 3 == 0) for number in range(NUM_SAMPLES)]
    assert exceeded(samples(what, raised)) == []


def first_tokens(factor: float, slow_machine: float) -> Relative:
    """An hour in which first tokens and plain reads of the last ten minutes take longer."""
    rng = random.Random(0)
    times_s = [float(at_s) for at_s in range(3600)]
    tokens = [
        (at_s, (0.02 + 0.01 * rng.random()) * (factor * slow_machine if at_s >= 3000 else 1.0))
        for at_s in times_s
    ]
    reads = [(at_s, 0.006 * (slow_machine if at_s >= 3000 else 1.0)) for at_s in times_s]
    return Relative(tokens, reads)


def test_slower_first_tokens_are_found() -> None:
    assert first_tokens(1.0, 1.0).row(600, 3600, 600).is_met
    assert first_tokens(1.0, 3.0).row(600, 3600, 600).is_met, "the machine is slower, not the server"
    row = first_tokens(1.2, 3.0).row(600, 3600, 600)
    assert row.change == pytest.approx(1.2, rel=0.03) and not row.is_met


def test_the_load_follows_from_the_seed() -> None:
    first, again, other = (list(itertools.islice(visits(Load(seed=seed)), 2000)) for seed in (0, 0, 1))
    assert first == again != other
    assert sum(visit.leaves_after is not None for visit in first) == pytest.approx(600, abs=60)
    assert sum(visit.gap_s for visit in first) == pytest.approx(2000 / 6, rel=0.1)
    asked = [visit.place for visit in first]
    assert len(set(asked)) > 200 and asked.count(0) > 10 * asked.count(299)


@pytest.mark.parametrize("task", ANSWERS)
def test_variants_of_an_adapter_have_its_products(task: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    for name in ("a", "b"):
        write_adapter(tmp_path / name, task, rng)
    base, *made = (
        load_file(directory / WEIGHTS)
        for directory in (demo_adapters_path() / task, tmp_path / "a", tmp_path / "b")
    )
    for name in (name for name in base if "lora_A" in name):
        products = [
            one[name.replace("lora_A", "lora_B")].double() @ one[name].double() for one in (base, *made)
        ]
        assert torch.equal(products[0], products[1]) and torch.equal(products[0], products[2])
    assert (tmp_path / "a" / WEIGHTS).read_bytes() != (tmp_path / "b" / WEIGHTS).read_bytes()
