"""The package as its users import it."""

import subprocess
import sys

import corun


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
