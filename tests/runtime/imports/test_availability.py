"""What transformers is told that a process does without, it does not import."""

import subprocess
import sys

_TOKENIZER = """
import logging, sys
logging.basicConfig(level="INFO")
from corun.runtime.imports.availability import leave_out_torch
leave_out_torch()
from corun.runtime.demo import demo_model_path
from corun.runtime.frontend.tokenizer import Tokenizer
tokenizer = Tokenizer.load(str(demo_model_path()))
assert tokenizer.decode(tokenizer.encode("hello there")).endswith("hello there")
assert "torch" not in sys.modules
"""

_OTHER_VERSION = """
import logging
from types import ModuleType
from corun.runtime.imports import availability
logging.basicConfig(level="INFO")
availability._deny("is_torch_available", ModuleType("other"))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_tokenizers_do_without_torch_and_nobody_is_warned() -> None:
    assert run(_TOKENIZER) == ""


def test_a_version_without_the_question_is_told_of() -> None:
    assert "has no is_torch_available: more is imported than is used" in run(_OTHER_VERSION)
