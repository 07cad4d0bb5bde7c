"""Options from the environment: kinds, several values, wrong ones, and their precedence."""

from pathlib import Path
from typing import Any

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.flags import build_configs
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.config.variables import PREFIX, read_variables
from corun.runtime.errors import ConfigError

_SPECS = option_specs(EngineConfig) + option_specs(ServeConfig)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("MODEL", "some/model", "some/model"),
        ("PORT", "81", 81),
        ("MEMORY_GIB", "1.5", 1.5),
        ("CPU_CORES", "3", "3"),
        ("TRUST_REMOTE_CODE", "1", True),
        ("TRUST_REMOTE_CODE", "Off", False),
        ("API_KEY", "one 'two three'", ("one", "two three")),
        ("SERVED_MODEL_NAME", 'a "b c"', ("a", "b c")),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    values = read_variables({PREFIX + name: text, "PORT": "1", "PATH": "/bin"}, _SPECS)
    assert values == {name.lower(): value}
    assert type(values[name.lower()]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PORT", "tcp://10.0.0.1:80", "CORUN_PORT is 'tcp://10.0.0.1:80', must be a whole number"),
        ("PORT", "65536", "CORUN_PORT is 65536, must be at most 65535"),
        ("API_KEY", "", "CORUN_API_KEY is empty"),
        ("HOST", " ", "CORUN_HOST is empty"),
        ("QUEUES", "fixed:2", "CORUN_QUEUES is gone: give --scheduling-policy chameleon:queues=K"),
        ("API_KEY", "'a", "CORUN_API_KEY .*No closing quotation"),
        ("TRUST_REMOTE_CODE", "maybe", "CORUN_TRUST_REMOTE_CODE is 'maybe', must be one of 1, true"),
        ("DTYPE", "bf16", r"CORUN_DTYPE is 'bf16', must be one of .* \(did you mean bfloat16\?\)"),
    ],
)
def test_wrong_values_name_the_variable(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_variables({PREFIX + name: text}, _SPECS)


def test_a_variable_that_is_nearly_an_option_is_named(caplog: pytest.LogCaptureFixture) -> None:
    environment = {f"{PREFIX}MAX_NUM_SEQ": "3", f"{PREFIX}SERVICE_HOST": "10.0.0.1"}
    assert read_variables(environment, _SPECS) == {}
    (record,) = caplog.records
    assert record.message == (
        "unknown environment variable CORUN_MAX_NUM_SEQ (did you mean CORUN_MAX_NUM_SEQS?)"
    )


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "corun.yaml"
    path.write_text("port: 1\nhost: file\nmax-num-seqs: 2\nlog-level: debug", encoding="utf-8")
    environment = {"CORUN_PORT": "2", "CORUN_HOST": "variable", "CORUN_MAX_NUM_SEQS": "3"}
    engine, serve = build_configs(
        {"port": "9"}, (EngineConfig, ServeConfig), environment=environment, yaml_path=str(path)
    )
    assert (serve.port, serve.host, serve.log_level) == (9, "variable", "debug")
    assert engine.max_num_seqs == 3


def test_a_command_takes_only_its_own_options() -> None:
    environment = {"CORUN_DEVICE": "cpu", "CORUN_MAX_NUM_SEQS": "3"}
    (config,) = build_configs({}, (EngineConfig,), environment=environment, command="profile")
    assert (config.device, config.max_num_seqs) == ("cpu", 256)
