"""Rules for imports: folders, packages without cycles, and policy that loads nothing heavy."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest
from support.product import (
    ROOT,
    Import,
    imports_of,
    is_below,
    module_of,
    modules,
    name_of,
    nodes_of,
    product_files,
)

# Which parts of the product a folder may import; a dotted name allows everything below it. The
# longest matching folder decides.
_ALLOWED_IMPORTS = {
    # Of the profiles the pure part.
    "runtime": (
        "runtime",
        "cpu_workers.process_life",  # how a process begins and ends: standard library only
        "cpu_workers.affinity",  # how a thread is pinned: the same
        "cpu_workers.kernels.simd.isa",  # names of levels and their environment
        "cpu_workers.teams",  # how many workers compute a job: pure
        "shm.arena_ranges",  # which ranges of anything are free: pure
        "profiles.busy",
        "profiles.curve",
        "profiles.derive",
        "profiles.find",
        "profiles.fit",
        "profiles.link",
        "profiles.meter",
        "profiles.models",
        "profiles.picture",
        "profiles.profile",
        "profiles.report",
        "profiles.step_time",
    ),
    # Composition: only this puts policy and mechanism together.
    "runtime/engine/assembly": ("runtime", "gpu", "shm", "cpu_workers", "profiles"),
    "runtime/cli/env.py": ("runtime", "cpu_workers.kernels"),
    "runtime/model_trials": ("runtime", "gpu.model", "cpu_workers.affinity"),
    "gpu": (
        "gpu",
        "shm",
        "cpu_workers.kernels",
        # The side of the CPU workers that the device talks to.
        "cpu_workers.pool",
        "cpu_workers.teams",
        # How a thread is pinned is the same on both sides.
        "cpu_workers.affinity",
        # Waiting time of this process's threads for cores.
        "cpu_workers.run_queue",
        # Resources of the machine, and the division of its cores: plain data, policy.
        "runtime.machine",
        # How transfers share a link: simulations share it the same way. Pure.
        "profiles.link",
        "runtime.plan",
        "runtime.sampling",
        "runtime.errors",
        "runtime.config",
        "runtime.grammar.matcher",  # what a row may draw: numpy and llguidance alone
        # Plain data of an adapter, on its way to the device.
        "runtime.adapters.digest",
        "runtime.adapters.target_map",
        "runtime.adapters.resolved",
        "runtime.adapters.tensor_names",
        "runtime.adapters.values",  # what of it can be served in which type: numpy alone
        "runtime.kept_records",
        "runtime.whole_file",
        "runtime.memory.host_budget",  # how the host's memory is divided into sections: pure
        "runtime.memory.pages",  # how an adapter is divided into runs of pages: pure
    ),
    # A program. It knows all parts, as it starts engines.
    "gpu/check": ("gpu", "shm", "cpu_workers.process_life", "profiles.models", "runtime"),
    "cpu_workers": ("cpu_workers", "shm"),
    "shm": ("shm",),
    "profiles": ("profiles", "cpu_workers.teams"),
    "profiles/measure": (
        "profiles",
        "gpu",
        "cpu_workers",
        "shm",
        "runtime.adapters.target_map",
        # Whole steps are those of an engine's executor.
        "runtime.plan",
        "runtime.sampling",
    ),
}

# Policy decides and never computes: standard library and numpy only.
_POLICY = (
    "runtime.plan",
    "runtime.request",
    "runtime.sampling",
    "runtime.errors",
    "runtime.limits",
    "runtime.adapters.names",
    "runtime.adapters.values",
    "runtime.adapters.registry",
    "runtime.adapters.target_map",
    "runtime.engine.core",
    "runtime.engine.messages",
)
_POLICY_PACKAGES = (
    "runtime/cluster/policy",
    "runtime/cluster/policy/papers",
    "runtime/scheduler",
    "runtime/scheduler/papers/chameleon",
    "runtime/coldstart",
    "runtime/machine",
    "runtime/memory",
    "runtime/memory/papers",
    "runtime/memory/policies",
    "runtime/config",
    "runtime/sim",
    "runtime/sim/papers",
    "runtime/cli",
)
_MAX_USES_OF_MEMORY = 25  # of its parts, from outside
_HEAVY = ("torch", "transformers", "triton", "numba", "tokenizers", "peft")


def _allowed(file: str) -> tuple[str, ...]:
    matching = [rule for rule in _ALLOWED_IMPORTS if file == rule or file.startswith(f"{rule}/")]
    return _ALLOWED_IMPORTS[max(matching, key=len)]


def test_folders_import_only_what_they_may() -> None:
    wrong = [
        f"{item.file}:{item.line} imports {item.target}"
        for path in product_files()
        if path.parent != ROOT
        for item in imports_of(path)
        # The version is the root's only name that the inside needs.
        if item.target != "__version__"
        and not any(is_below(item.target, allowed) for allowed in _allowed(item.file))
    ]
    assert not wrong, "\n".join(wrong)


def test_only_what_runs_the_model_knows_that_passes_are_replayed() -> None:
    """Kernels are called by ``gpu.forward.launcher``, also when calls are recorded."""
    wrong = [
        f"{item.file}:{item.line} imports {item.target}"
        for path in product_files()
        if not name_of(path).startswith(("gpu/replay/", "gpu/execution/"))
        for item in imports_of(path)
        if is_below(item.target, "gpu.replay")
    ]
    assert not wrong, "\n".join(wrong)


def test_one_server_knows_nothing_of_clusters() -> None:
    """Only clusters themselves, simulated ones and their commands import any of it."""
    wrong = [
        f"{item.file}:{item.line} imports {item.target}"
        for path in product_files()
        if not name_of(path).startswith(("runtime/cluster/", "runtime/sim/", "runtime/cli/"))
        for item in imports_of(path)
        if is_below(item.target, "runtime.cluster")
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_of_memory_are_used_behind_its_verbs() -> None:
    """``memory.admit``, ``commands`` and others decide; few places name a part of the memory."""
    tree = ast.parse((ROOT / "runtime/memory/device_memory.py").read_text(encoding="utf-8"))
    parts = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not node.attr.startswith(("_", "num_", "keeps_"))  # numbers are no parts
        and not node.attr.endswith("_bytes")
    }
    assert {"pool", "cache", "prefixes", "transfers"} <= parts
    uses = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in product_files()
        if not name_of(path).startswith("runtime/memory/")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and node.attr in parts
        and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "memory"
    ]
    assert len(uses) <= _MAX_USES_OF_MEMORY, "\n".join(uses)


def _is_paper(path: Path) -> bool:
    return "papers" in path.relative_to(ROOT).parts


def _is_of_papers(item: Import) -> bool:
    return "papers" in item.target.split(".")


def test_papers_are_imported_on_use_by_registries_alone() -> None:
    """``papers`` import the core. Only a function of a ``registry.py`` imports them."""
    wrong = []
    for path in product_files():
        if _is_paper(path):
            continue
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
        for item in imports_of(path):
            if not _is_of_papers(item):
                continue
            is_on_use = any(one.lineno <= item.line <= (one.end_lineno or one.lineno) for one in functions)
            if path.name != "registry.py" or not is_on_use:
                wrong.append(f"{item.file}:{item.line} imports {item.target}")
    assert not wrong, "\n".join(wrong)


def test_product_imports_itself_relatively() -> None:
    wrong = []
    for path in product_files():
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            wrong += [f"{name_of(path)}:{node.lineno}" for n in names if is_below(n, "corun")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("depth", [2, None])
def test_packages_import_each_other_in_no_circle(depth: int | None) -> None:
    """A package is a folder, with all below ``depth``: ``runtime.cluster`` with its gateway.

    Imports count wherever they stand: in functions, and for types. Only imports of papers by
    registries do not: papers import the core that names them.
    """
    edges: dict[str, dict[str, str]] = {}  # package: what it imports, and where
    for name, path in modules().items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for item in imports_of(path):
            module = module_of(item.target)
            if module is None or (_is_of_papers(item) and not _is_paper(path)):
                continue
            is_package = modules()[module].name == "__init__.py"
            other = module if is_package else module.rpartition(".")[0]
            package, other = (".".join(name.split(".")[:depth]) for name in (package, other))
            if package and other and other != package:
                edges.setdefault(package, {})[other] = f"{item.file}:{item.line}"
    try:
        TopologicalSorter({package: others.keys() for package, others in edges.items()}).prepare()
    except CycleError as error:
        # Each is imported by the next one.
        circle = list(reversed(error.args[1]))
        steps = [f"{one} imports {other} ({edges[one][other]})" for one, other in pairwise(circle)]
        raise AssertionError("\n".join(steps)) from None


def _policy_modules() -> list[str]:
    files = [path for folder in _POLICY_PACKAGES for path in (ROOT / folder).glob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return sorted([*_POLICY, *(name for name in names if not name.endswith("__init__"))])


def test_policy_loads_no_heavy_library() -> None:
    """Import them one after the other in a fresh process; none may bring one along."""
    names = ["corun", *(f"corun.{name}" for name in _policy_modules())]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {_HEAVY!r} if heavy in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'{name} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
