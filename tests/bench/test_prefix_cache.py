"""The measurement of kept KV: its control flow, with a model of a few kilobytes."""

import json
import subprocess
import sys
from pathlib import Path

import prefix_cache
import pytest
from models import llama_config, make_adapters, save_model


@pytest.mark.full
def test_every_case_compares_and_judges(tmp_path: Path) -> None:
    config = llama_config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    save_model(config, tmp_path / "model")
    make_adapters(tmp_path / "model", tmp_path / "adapters")
    # What is set in a process that is the engine's own has no place in this one.
    command = [sys.executable, prefix_cache.__file__, "--directory", str(tmp_path)]
    command += ["--pairs", "1", "--cases", "turn", "reuse", "host"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert not done.returncode, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert all(value > 0 for cell in report["figures"].values() for value in cell["ms"])
    assert list(report["pass"]) == [
        "second turn <= 0.25",
        "no reuse, history grows <= 1.03",
        "no reuse, pool full <= 1.03",
    ]
