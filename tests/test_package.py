"""The package as users import it."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import corun
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NOT_SOURCE = """
    .git .venv build dist results shared *.egg-info __pycache__ .*_cache .hypothesis
""".split()
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("dist")
build_meta.build_wheel("dist")
"""
CONSUMER = """
from typing import assert_type

from corun import Engine, LoRARequest, RequestOutput, SamplingParams


def answers(prompt: str) -> list[str]:
    params = SamplingParams(max_tokens=4)
    with Engine(model="demo") as engine:
        outputs = engine.generate([prompt], params, LoRARequest("sql", 1, "adapters/sql"))
    assert_type(outputs, list[RequestOutput])
    return [choice.text for output in outputs for choice in output.outputs]


SamplingParams(max_tokens="four")  # type: ignore[arg-type]
"""
KNOWN_FROM_WITHIN = {"torch", "transformers", "numba", "llvmlite", "uvicorn"}
READ_REQUESTS = {"starlette", "aiohttp", "msgspec", "uvicorn"}


def test_what_is_tested_is_what_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    allowed = [Requirement(text) for text in sum(extras, project["dependencies"])]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {one.name: one.specifier for one in map(Requirement, filter(_is_entry, lines))}
    for one in allowed:
        operators = {bound.operator for bound in one.specifier}
        assert one.name not in KNOWN_FROM_WITHIN or "<" in operators, one
        assert one.name not in READ_REQUESTS or ">=" in operators, one
        for bound in tested.get(one.name, ()):
            assert bound.operator != "==" or one.specifier.contains(bound.version), one
    assert {one.name for one in allowed} & tested.keys() >= KNOWN_FROM_WITHIN | READ_REQUESTS


def _is_entry(line: str) -> bool:
    return bool(line) and not line.startswith("#")


def test_version_is_set() -> None:
    assert corun.__version__.count(".") == 2


def test_what_a_policy_is_written_with_loads_next_to_nothing() -> None:
    names = ("PolicyFacts", "Request", "SchedulerPolicy", "Verdict")
    assert set(names) <= set(corun.__all__)
    script = (
        "import sys, corun\n"
        f"for name in {names!r}:\n"
        "    assert getattr(corun, name).__name__ == name\n"
        "loaded = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/cpu.md"])
def test_the_cpu_build_that_the_readme_installs_is_the_tested_one(page: str) -> None:
    tested = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    named = set(re.findall(r"torch==([\d.]+)\+cpu", (ROOT / page).read_text()))
    assert tested is not None and named == {tested[1]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, and in its dist/ a source distribution and a wheel."""
    copy = tmp_path_factory.mktemp("package") / "corun"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy


def test_the_source_distribution_is_the_repository(source: Path) -> None:
    built = {"dist", "build", "corun.egg-info"}
    paths = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    expected = {path.as_posix() for path in paths if path.parts[0] not in built}
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert not expected - names


def test_the_wheel_has_the_package_alone(source: Path) -> None:
    (wheel,) = (source / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    information = f"corun-{corun.__version__}.dist-info/"
    assert all(name.startswith(("corun/", information)) for name in names)
    assert not [name for name in names if name.startswith(("corun/tests/", "corun/bench/"))]
    assert {"corun/py.typed", "corun/runtime/cli/main.py"} <= set(names)


def test_a_consumer_is_checked_against_the_types_of_the_wheel(source: Path) -> None:
    environment = source.parent / "consumer"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    script = environment / "consumer.py"
    script.write_text(CONSUMER)
    command = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=/dev/null")
    python = environment / "bin" / "python"
    done = subprocess.run(
        [*command, "--python-executable", python, script], cwd=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
