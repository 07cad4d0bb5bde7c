"""``corun check``: whether an adapter can be served over a model, and what quantisation costs."""

import argparse
import os
from pathlib import Path

from ..config.demo import with_demo
from ..config.engine import EngineConfig
from ..config.flags import build_configs
from ..demo import demo_text_path
from ..errors import ConfigError, encodable


def run(arguments: argparse.Namespace) -> int:
    """Print the requested reports; return 0 unless the adapter cannot be served."""
    (config,) = build_configs(vars(arguments), (EngineConfig,), environment=os.environ, command="check")
    if arguments.adapter is None and config.quantization is None:
        raise ConfigError("corun check needs an ADAPTER, or --quantization, or both")
    config = with_demo(config)
    is_servable = arguments.adapter is None or _check_adapter(Path(arguments.adapter), config)
    if config.quantization is not None:
        _check_quantization(config, Path(arguments.text or demo_text_path()))
    return 0 if is_servable else 1


def _check_adapter(adapter: Path, config: EngineConfig) -> bool:
    assert config.model is not None
    from ..engine.assembly.adapter_check import run_check
    from ..engine.assembly.placement import verdicts_directory

    report = run_check(
        adapter,
        config.model,
        dtype=config.dtype,
        max_rank=config.max_lora_rank,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        kept_bases=verdicts_directory(),
    )
    for line in report.lines():
        print(encodable(line))
    return report.ok


def _check_quantization(config: EngineConfig, text: Path) -> None:
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text}: {error}") from error
    from ..engine.assembly.quantization_check import compare_quantized

    for line in compare_quantized(config, content).lines():
        print(line)
