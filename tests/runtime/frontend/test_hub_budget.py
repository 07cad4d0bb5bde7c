"""Limits of what is fetched from a hub."""

from pathlib import Path

import pytest
from corun.runtime.errors import AdapterError
from corun.runtime.frontend.hub_budget import HubBudget, bytes_of_adapters
from corun.runtime.limits import HubLimits

LIMITS = HubLimits(max_adapter_bytes=100, max_adapters=2, max_cache_bytes=150)


@pytest.fixture
def served() -> set[str]:
    return set()


@pytest.fixture
def budget(served: set[str]) -> HubBudget:
    return HubBudget(LIMITS, served.__contains__)


def add_repository(cache: Path, name: str, num_bytes: int, *, config: bool = True) -> None:
    """As the hub's library lays it out."""
    blobs, snapshot = (cache / f"models--{name}" / one for one in ("blobs", "snapshots/abc"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "weights").write_bytes(bytes(num_bytes))
    (blobs / "config").write_bytes(b"{}" if config else b"")
    (snapshot / "adapter_model.safetensors").symlink_to(blobs / "weights")
    if config:
        (snapshot / "adapter_config.json").symlink_to(blobs / "config")


def fetch(budget: HubBudget, name: str, num_bytes: int, cache: Path) -> None:
    with budget.reserved(name, num_bytes, cache):
        pass


def test_the_size_of_one(budget: HubBudget) -> None:
    budget.check_size("a", 100)
    with pytest.raises(AdapterError, match=r"'a' has 101 bytes.*at most 100.*--max-hub-adapter-mib"):
        budget.check_size("a", 101)


def test_the_number(budget: HubBudget, served: set[str], tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        fetch(budget, name, 0, tmp_path)
        served.add(name)
    with pytest.raises(AdapterError, match=r"'c' is not fetched: 2 adapters.*--max-hub-adapters"):
        fetch(budget, "c", 0, tmp_path)
    served.remove("b")  # it is unloaded
    fetch(budget, "c", 0, tmp_path)


def test_fetches_that_run_count(budget: HubBudget, tmp_path: Path) -> None:
    with (
        budget.reserved("a", 60, tmp_path),
        budget.reserved("a", 30, tmp_path),
        budget.reserved("b", 60, tmp_path),
    ):
        with pytest.raises(AdapterError, match="--max-hub-adapters"):
            fetch(budget, "c", 0, tmp_path)
        with pytest.raises(AdapterError, match="--max-hub-gib"):
            fetch(budget, "b", 1, tmp_path)
    fetch(budget, "c", 100, tmp_path)


def test_a_fetch_that_fails_takes_nothing(budget: HubBudget, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with pytest.raises(ValueError, match="no"), budget.reserved(name, 100, tmp_path):
            raise ValueError("no")
    for name in ("d", "e"):
        fetch(budget, name, 100, tmp_path)


def test_the_bytes_in_the_cache(tmp_path: Path) -> None:
    add_repository(tmp_path, "adapter", 100)
    add_repository(tmp_path, "base", 1_000_000, config=False)
    used = bytes_of_adapters(tmp_path)
    assert 102 <= used < 1_000_000
    limits = HubLimits(max_adapter_bytes=100, max_cache_bytes=used + 10)
    budget = HubBudget(limits, lambda name: True)
    fetch(budget, "a", 10, tmp_path)
    with pytest.raises(AdapterError, match=r"its 11 bytes.*are more than.*--max-hub-gib"):
        fetch(budget, "b", 11, tmp_path)
    fetch(budget, "c", 0, tmp_path)  # its files are in the cache


def test_a_link_to_nothing_has_few_bytes(tmp_path: Path) -> None:
    add_repository(tmp_path, "adapter", 1_000_000)
    (tmp_path / "models--adapter" / "blobs" / "weights").unlink()
    (tmp_path / "models--adapter" / "blobs" / "shared").symlink_to(tmp_path / "nothing")
    assert bytes_of_adapters(tmp_path) < 1_000_000
    assert bytes_of_adapters(tmp_path / "nothing") == 0
