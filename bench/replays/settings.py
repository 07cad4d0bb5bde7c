"""The cells: recipes at loads, policies, predictors; machines and memory policies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replays.cells import ACCURACY, PAGES, POLICIES, predictor_name

DEFAULT_POLICIES = ("corun", "slora", "fcfs", "chameleon")
# Loads of these are shares of what is served when requests never stop coming, those of the others
# are in units of the largest rate that ``slora`` bears.
IN_UNITS_OF_CAPACITY = frozenset({"S4"})


@dataclass(frozen=True, slots=True)
class Setting:
    """A recipe at a load, and how well outputs are predicted."""

    recipe: str
    load: float  # where memory policies are compared: requests/s
    accuracy: float | None = ACCURACY  # of the oracle; None = ``history``
    machine: str | None = None  # None = the recipe's

    @property
    def name(self) -> str:
        """Without the predictor where it is the usual one."""
        name = f"{self.recipe} at {self.load:g}"
        if self.machine is not None:
            name += f" on {self.machine}"
        is_usual = self.accuracy == ACCURACY
        return name if is_usual else f"{name}, {predictor_name(self.accuracy)}"


DEFAULT_SETTINGS = (Setting("S1", 1.1), Setting("S3", 1.0))
FULL_SETTINGS = (
    *(Setting("S1", load) for load in (1.0, 1.1, 1.2)),
    *(Setting(recipe, load) for recipe in ("S2", "S3", "S5") for load in (1.0, 1.1)),
    *(Setting("S4", load) for load in (0.15, 0.5)),
)
# Run by ``corun`` alone; the oracle at 80 % is among those above.
ACCURACY_SETTINGS = tuple(
    Setting("S1", load, accuracy) for load in (1.0, 1.1, 1.2) for accuracy in (1.0, 0.6, None)
)
LIMITED_RECIPES = ("S1", "S2", "S3", "S4", "S5")  # of which the largest load is looked for
LIMITED_POLICY = "corun"


ZIPF_SLOW = Setting("zipf", 7.5, machine="a40-llama8b-link3")
ZIPF = Setting("zipf", 7.5)  # at 12 GB/s
GENTD26_SLOW = Setting("gentd26", 7.5, machine="a40-llama8b-link3")
WITH_WORKERS = (
    Setting("zipf", 7.5, machine="a40-llama8b-workers"),
    Setting("gentd26", 7.5, machine="a40-llama8b-workers"),
)
# For KV of conversations that has left the device.
HOST_KV_GIB: Mapping[str, int] = {"mooncake-16": 512, "mooncake-8": 512}
# One pool of pages against a split of it.
ZIPF_PAGES = Setting("zipf", 8.0, machine=f"a40-llama8b{PAGES}")
WITH_PAGES = (
    ZIPF_PAGES,
    Setting("gentd26", 6.0, machine=f"a40-llama8b{PAGES}"),
    Setting("mooncake-8", 1.2, machine=f"a40-llama7b{PAGES}"),
)
MOONCAKE = tuple(Setting("mooncake-8", rate_rps) for rate_rps in (1.2, 1.4, 1.55))
# 1.0, 1.2 and 1.4 of what ``lru`` serves if requests never stop coming: 1.46 and 2.85 requests/s.
LIBRA = (
    *(Setting("mooncake-8", rate_rps) for rate_rps in (1.46, 1.75, 2.04)),
    *(Setting("mooncake-16", rate_rps) for rate_rps in (2.85, 3.42, 4.0)),
)
START = Setting("gentd26", 2.0, machine="a40-llama8b-link3")  # of which 500 requests are enough
DEFAULT_MEMORY_SETTINGS = (ZIPF_SLOW, MOONCAKE[1])
FULL_MEMORY_SETTINGS = (
    ZIPF_SLOW,
    ZIPF,
    GENTD26_SLOW,
    Setting("gentd26", 7.5),
    *WITH_WORKERS,
    Setting("mooncake-16", 2.2),
    *MOONCAKE,
    *WITH_PAGES,
)
DEFAULT_MEMORY_POLICIES = ("corun", "lru", "discard-idle", "slora", "static-split")


def runs_of(
    settings: Iterable[Setting], policies: Sequence[str], known: Sequence[str] = POLICIES
) -> list[tuple[Setting, str]]:
    """Every policy in every setting, in the order of ``known``."""
    return [(setting, policy) for setting in settings for policy in known if policy in policies]
