"""Options: their kinds, choices and checks, from the environment, and what processes set first."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from corun.cpu_workers.deltas.base import BACKEND_NAMES
from corun.cpu_workers.kernels.simd.isa import forcing_environment
from corun.gpu.linear.select import BACKENDS
from corun.runtime.config.codec import config_from_dict, config_to_dict
from corun.runtime.config.engine import DELTA_BACKENDS, LINEAR_BACKENDS, EngineConfig
from corun.runtime.config.environment import own_environment
from corun.runtime.config.flags import build_configs
from corun.runtime.config.option import option_specs
from corun.runtime.config.serve import ServeConfig
from corun.runtime.config.variables import PREFIX, read_variables
from corun.runtime.config.yaml_file import read_yaml_options
from corun.runtime.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st

_SPECS = option_specs(EngineConfig) + option_specs(ServeConfig)


def _write(directory: Path, text: str) -> str:
    path = directory / "corun.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", 1, "--max-model-len is 1, must be at least 2"),
        ("max_model_len", "8", "--max-model-len is '8', must be a whole number"),
        ("max_num_seqs", True, "--max-num-seqs is True, must be a whole number"),
        ("max_num_seqs", None, "--max-num-seqs is None, must be a whole number"),
        ("max_num_batched_tokens", 2**40, "must be at most 1048576"),
        ("memory_gib", 0, "--memory-gib is 0.0, must be more than 0"),
        ("memory_gib", float("nan"), "--memory-gib is nan, must be a finite number"),
        ("memory_gib", float("inf"), "must be a finite number"),
        ("memory_fraction", 1.5, "--memory-fraction is 1.5, must be at most 1"),
        ("max_lora_rank", 257, "--max-lora-rank is 257, must be at most 256"),
        ("dtype", "bf16", r"must be one of auto, float32, .* \(did you mean bfloat16\?\)"),
        ("trust_remote_code", 1, "--trust-remote-code is 1, must be true or false"),
        ("model", "", "MODEL is empty"),
        ("model", 7, "MODEL is 7, must be text"),
        ("lora_modules", (3,), "--lora-modules is 3, must be text"),
        ("cpu_cores", "2-", "--cpu-cores is '2-', must be CPU numbers and ranges"),
        ("cpu_cores", 2.5, "--cpu-cores is 2.5, must be text"),
        ("engine_cores", "auto", "--engine-cores is 'auto', must be CPU numbers"),
    ],
)
def test_wrong_values_name_flag_value_and_limit(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: value})


def test_the_tokens_of_a_step_depend_on_the_device() -> None:
    assert [EngineConfig().step_tokens(device) for device in ("cpu", "cuda")] == [512, 2048]
    assert EngineConfig(max_num_batched_tokens=1).step_tokens("cuda") == 1


@pytest.mark.parametrize("port", [-1, 65536])
def test_port_has_a_range(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port is {port}"):
        ServeConfig(port=port)


def test_metrics_prefix_is_a_name() -> None:
    with pytest.raises(ConfigError, match="--metrics-prefix is '1x'"):
        ServeConfig(metrics_prefix="1x")


def test_values_get_their_exact_types() -> None:
    items: Any = ["a=b"]
    config = EngineConfig(memory_gib=2, lora_modules=items)
    assert type(config.memory_gib) is float
    assert config.lora_modules == ("a=b",)


def test_a_configuration_survives_the_way_to_another_process() -> None:
    config = EngineConfig(model="m", lora_modules=("a=b", "c=d"), memory_gib=1.5, seed=-3)
    wire = msgspec.msgpack.encode(config_to_dict(config))
    assert config_from_dict(EngineConfig, msgspec.msgpack.decode(wire)) == config


@pytest.mark.parametrize("data", [{"seed": "x"}, {"sede": 1}, {"max_num_seqs": 0}])
def test_a_broken_message_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_from_dict(EngineConfig, data)


def test_yaml_takes_dashes_underscores_and_adapter_mappings(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "model: m\nmax-model-len: 64\nmax_num_seqs: 4\nserved-model-name: x\n"
        "lora-modules:\n  - a=b\n  - {name: c, path: d}\n",
    )
    values = read_yaml_options(path, _SPECS)
    assert values == {
        "model": "m",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "served_model_name": ("x",),
        "lora_modules": ("a=b", '{"name": "c", "path": "d"}'),
    }


@pytest.mark.parametrize(("text", "value"), [("3", "3"), ("2-7,10", "2-7,10"), ("auto", "auto")])
def test_yaml_takes_cpu_lists_of_one_and_of_many(tmp_path: Path, text: str, value: str) -> None:
    path = _write(tmp_path, f"cpu-cores: {text}\n")
    assert EngineConfig(**read_yaml_options(path, _SPECS)).cpu_cores == value


def test_an_empty_yaml_file_changes_nothing(tmp_path: Path) -> None:
    assert read_yaml_options(_write(tmp_path, "# nothing\n"), _SPECS) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", r"unknown key 'max-model-length' \(did you mean max-model-len"),
        ("max-model-len: 5\nmax_model_len: 6", "max_model_len is given twice"),
        ("port: 1\nport: 2", "a key is given twice"),
        ("port: '80'", "port is '80', must be a whole number"),
        ("dtype: off", "dtype is False, must be text"),
        ("port: 99999", "port is 99999, must be at most 65535"),
        ("- port", "must be a mapping"),
        ("1: 2", "must be a mapping"),
        ("port: [", "not valid YAML: .* line 1"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_yaml_options(_write(tmp_path, text), _SPECS)


def test_a_yaml_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml_options(str(tmp_path / "none.yaml"), _SPECS)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_yaml_options(str(binary), _SPECS)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, "port: 1\nhost: h\nmax-num-seqs: 2")
    given = {"port": "9", "trust_remote_code": True, "config": path}
    engine, serve = build_configs(given, (EngineConfig, ServeConfig), environment={}, yaml_path=path)
    assert (serve.port, serve.host) == (9, "h")
    assert (engine.max_num_seqs, engine.trust_remote_code) == (2, True)


@given(st.text(max_size=80))
def test_no_text_makes_a_file_fail_otherwise(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.mktemp("yaml") / "any.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        read_yaml_options(str(path), _SPECS)
    except ConfigError as error:
        assert "any.yaml" in str(error)


def test_choices_are_the_parts_that_there_are() -> None:
    assert ("auto", *BACKENDS) == LINEAR_BACKENDS
    assert ("auto", *BACKEND_NAMES) == DELTA_BACKENDS


@pytest.mark.parametrize("cpu_isa", ["auto", "avx2"])
def test_the_level_and_the_queues_of_cuda_are_set(cpu_isa: str) -> None:
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert own_environment(cpu_isa, {}) == forcing_environment(cpu_isa) | queues


def test_what_the_user_set_stays() -> None:
    assert own_environment("auto", {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}) == {}


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
