"""Lists of CPUs, amounts of memory and adapters, as people write them."""

import os

import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.config.notations import (
    LoraModule,
    format_cpus,
    parse_cpu_cores,
    parse_lora_modules,
    parse_num_bytes,
)
from corun.runtime.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 2**32),
        ("4 gib", 2**32),
        ("1.5KiB", 1536),
        ("2MB", 2_000_000),
        ("3TiB", 3 * 2**40),
        ("7B", 7),
    ],
)
def test_amounts(text: str, num_bytes: int) -> None:
    assert parse_num_bytes(text, "--x") == num_bytes


@pytest.mark.parametrize("text", ["", "four", "-1", "4 G", "4GiBs", "1e9", "0.5B", "1.0001KB1"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ConfigError, match="--x is"):
        parse_num_bytes(text, "--x")


def test_lora_modules_are_pairs_or_json() -> None:
    items = ("up=/x/a=b", '{"name": "down", "path": "/y"}')
    assert parse_lora_modules(items) == (LoraModule("up", "/x/a=b"), LoraModule("down", "/y"))
    (module,) = parse_lora_modules((' {"name": "a", "path": "~/x", "base_model_name": "base"}',))
    assert module == LoraModule("a", os.path.expanduser("~/x"), "base")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("nopath",), "must be NAME=PATH"),
        (("=x",), "must not be empty"),
        (("{",), "not valid JSON"),
        (('{"name": "a"}',), "the keys must be name, path and"),
        (('{"name": "a", "path": 1}',), "must be text"),
        (('{"name": "a", "path": "x", "base_model_name": 1}',), "must be text"),
        (('{"name": "a", "path": "x", "rank": 1}',), "the keys must be"),
        (("a=x", "a=y"), "names 'a' twice: x and y"),
    ],
)
def test_bad_lora_modules_are_refused(items: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(lora_modules=items)


@pytest.mark.parametrize(
    ("text", "cpus"), [("3", (3,)), ("2-4,10", (2, 3, 4, 10)), ("5, 1", (5, 1)), ("0-0", (0,))]
)
def test_lists_are_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_cores(text, "--cpu-cores") == cpus


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_are_named_by_number(name: str) -> None:
    assert EngineConfig(device=name).device == name


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1,2", "cpu:0"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device is '{name}', must be one of auto, cuda"):
        EngineConfig(device=name)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,1", "1-3,2", "-1", "1;2", "0-99999999"])
def test_bad_lists_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--engine-cores is"):
        parse_cpu_cores(text, "--engine-cores")


@given(st.sets(st.integers(0, 40), min_size=1))
def test_lists_are_written_as_they_are_read(cpus: set[int]) -> None:
    assert parse_cpu_cores(format_cpus(tuple(cpus)), "x") == tuple(sorted(cpus))
