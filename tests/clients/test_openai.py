"""The openai package: chat, completions, models, streams, errors, and a history that goes back."""

import subprocess
from pathlib import Path

import pytest

from clients.environments import Install
from clients.recorder import Recorder

SCRIPT = Path(__file__).with_name("openai_script.py")


@pytest.mark.clients
def test_openai(recorder: Recorder, install: Install) -> None:
    commands = install("openai", "openai==3.57.0")
    subprocess.run([str(commands / "python"), str(SCRIPT), recorder.url], check=True, timeout=120)
