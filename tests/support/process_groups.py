"""Which tests run in one process, one after the other, when there are several processes.

Those of a file, because they share what is dear to make, and more where files share it or want the
same processors. The plugin's own groups are marks that change the ids of tests.
"""

from xdist.scheduler import LoadScopeScheduling

# Processes pinned to all processors that there are: two such tests at once would only wait.
PINNED = (
    "tests/bench/test_cold_start.py",
    "tests/cpu_workers/test_faults.py",
    "tests/cpu_workers/test_jobs.py",
    "tests/cpu_workers/test_pool.py",
    "tests/e2e/test_coexecution.py",
    "tests/e2e/test_device.py",
    "tests/e2e/test_profile.py",
    "tests/gpu/coexec/test_passes_and_workers.py",
    "tests/parity/test_coexecution",
    "tests/profiles/measure/",
)
# Each of its tests is a run of others, minutes long.
_EACH_ALONE = "tests/test_levels.py"
# The demo, served once.
SERVED = tuple(f"tests/e2e/test_{name}.py" for name in ("adapter_updates", "answers", "readme", "sampling"))


def group_of(path: str) -> str:
    """The group of the tests in the file ``path``, relative to the repository."""
    if path.startswith(PINNED):
        return "pinned"
    if path.startswith("tests/house/"):  # they share the syntax trees of all files
        return "house"
    return "served" if path in SERVED else path


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives groups to processes, in the order in which their first tests were found."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path == _EACH_ALONE else group_of(path)
