"""Reading vLLM's metrics, as recorded."""

import pytest
from corun.runtime.cluster.engine_types.vllm_metrics import read_metrics
from support.recorded_vllm import METRICS

TEXT = METRICS.encode()


def test_all_is_read_of_the_recorded_ones() -> None:
    metrics = read_metrics(TEXT)
    assert metrics.incarnation == "1795544567.890"
    assert metrics.is_awake and metrics.has_lora
    assert (metrics.num_running, metrics.num_waiting) == (1, 0)
    assert metrics.mean_prompt_tokens == 17 / 4
    assert (metrics.block_size, metrics.kv_tokens) == (128, 838784)
    assert 0.0 < metrics.kv_usage < 0.001
    assert metrics.max_loras == 4
    assert metrics.running_adapters == {"upper@0123456789abcdef"}


def test_the_newest_sample_of_an_info_metric_counts() -> None:
    idle = b'running_lora_adapters="",waiting_lora_adapters=""} '
    newer = TEXT.replace(idle + b"1.7955448147104743e+09", idle + b"1.8e+09")
    assert newer != TEXT and not read_metrics(newer).running_adapters


def test_engines_of_one_server_are_added_up() -> None:
    second = b"vllm:num_requests_running{"
    line = next(one for one in TEXT.splitlines() if one.startswith(second))
    both = TEXT.replace(line, line + b"\n" + line.replace(b'engine="0"', b'engine="1"'))
    assert read_metrics(both).num_running == 2


def test_older_servers_call_the_use_of_kv_otherwise() -> None:
    old = TEXT.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert read_metrics(old) == read_metrics(TEXT)


def test_blocks_count_if_tokens_are_missing() -> None:
    old = TEXT.replace(b'kv_cache_size_tokens="838784",', b"")
    assert old != TEXT and read_metrics(old).kv_tokens == 6553 * 128


def test_a_server_that_sleeps_is_not_awake() -> None:
    awake = b'sleep_state="awake"} '
    assert not read_metrics(TEXT.replace(awake + b"1.0", awake + b"0.0")).is_awake


@pytest.mark.parametrize(
    "family",
    [
        "process_start_time_seconds",
        "vllm:cache_config_info",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ],
)
def test_what_is_missing_is_named(family: str) -> None:
    lines = [one for one in TEXT.splitlines() if family.encode() not in one]
    with pytest.raises(ValueError, match=family):
        read_metrics(b"\n".join(lines))


def test_a_server_without_adapters_has_none_of_them() -> None:
    lines = [one for one in TEXT.splitlines() if b"vllm:lora_requests_info" not in one]
    assert not read_metrics(b"\n".join(lines)).has_lora
