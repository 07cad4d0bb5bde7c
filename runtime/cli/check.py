"""``corun check``: says whether an adapter can be served over a model."""

import argparse
import os
from pathlib import Path

from ..config.demo import with_demo
from ..config.engine import EngineConfig
from ..config.flags import build_configs


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 if the adapter can be served, else 1."""
    (config,) = build_configs(
        vars(arguments), (EngineConfig,), environment=os.environ, command="check"
    )
    config = with_demo(config)
    assert config.model is not None
    from ..engine.assembly.adapter_check import run_check

    report = run_check(
        Path(arguments.adapter),
        config.model,
        max_rank=config.max_lora_rank,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    for line in report.lines():
        print(line)
    return 0 if report.ok else 1
