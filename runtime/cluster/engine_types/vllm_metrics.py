"""Reads the load of an engine from vLLM's ``/metrics``. Pure.

Families have the names of vLLM 0.32; for ``kv_cache_usage_perc`` also the name before 0.9. Families
with a label ``engine`` are summed over it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(rb"(?:\{(.*)\})? ([^ ]+)(?: \d+)?$")
_LABEL = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')

_STARTED = b"process_start_time_seconds"
_LORA = b"vllm:lora_requests_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """The metrics at one moment."""

    incarnation: str  # the start time of the server's process
    is_awake: bool  # False in vLLM's sleep mode
    num_running: int
    num_waiting: int
    mean_prompt_tokens: float  # over all requests so far
    kv_usage: float  # share of the blocks that are in use
    kv_tokens: int
    block_size: int
    has_lora: bool
    max_loras: int  # on the device at once
    running_adapters: frozenset[str]
    waiting_adapters: frozenset[str]


def read_metrics(text: bytes) -> VllmMetrics:
    """Read the metrics. Raises ``ValueError`` with the name of a missing family."""
    cache = _newest(text, b"vllm:cache_config_info")
    block_size = int(cache.get("block_size", "0") or 0)
    kv_tokens = sum(_kv_tokens(labels) for labels, _ in _samples(text, b"vllm:cache_config_info"))
    if block_size < 1 or kv_tokens < 1:
        raise ValueError("its /metrics has no vllm:cache_config_info with blocks")
    usage = _values(text, b"vllm:kv_cache_usage_perc") or _values(text, b"vllm:gpu_cache_usage_perc")
    if not usage:
        raise ValueError("its /metrics has no vllm:kv_cache_usage_perc")
    lora = _newest(text, _LORA)
    num_prompts = sum(_values(text, b"vllm:request_prompt_tokens_count"))
    prompt_tokens = sum(_values(text, b"vllm:request_prompt_tokens_sum"))
    return VllmMetrics(
        incarnation=_started(text),
        is_awake=not any(
            labels.get("sleep_state") == "awake" and not value
            for labels, value in _samples(text, b"vllm:engine_sleep_state")
        ),
        num_running=_count(text, b"vllm:num_requests_running"),
        num_waiting=_count(text, b"vllm:num_requests_waiting"),
        mean_prompt_tokens=prompt_tokens / num_prompts if num_prompts else 0.0,
        kv_usage=min(max(sum(usage) / len(usage), 0.0), 1.0),
        kv_tokens=kv_tokens,
        block_size=block_size,
        has_lora=b"\n# TYPE " + _LORA + b" " in text,
        max_loras=max(int(lora.get("max_lora", "1")), 1),
        running_adapters=_names(lora.get("running_lora_adapters", "")),
        waiting_adapters=_names(lora.get("waiting_lora_adapters", "")),
    )


def _samples(text: bytes, family: bytes) -> Iterator[tuple[dict[str, str], float]]:
    """Yield labels and value of each sample. O(samples), plus one search of the text."""
    mark = b"\n" + family
    start = text.find(mark)
    while start >= 0:
        begin = start + len(mark)
        end = text.find(b"\n", begin)
        line = text[begin : end if end >= 0 else len(text)]
        found = _SAMPLE.match(line) if line[:1] in (b"{", b" ") else None
        if found is not None:
            labels = {name.decode(): value.decode() for name, value in _LABEL.findall(found[1] or b"")}
            yield labels, float(found[2])
        start = text.find(mark, begin)


def _values(text: bytes, family: bytes) -> list[float]:
    return [value for _, value in _samples(text, family)]


def _count(text: bytes, family: bytes) -> int:
    values = _values(text, family)
    if not values:
        raise ValueError(f"its /metrics has no {family.decode()}")
    return round(sum(values))


def _newest(text: bytes, family: bytes) -> dict[str, str]:
    """Return labels of the sample with the largest value: the newest of an info metric."""
    found: tuple[dict[str, str], float] = ({}, 0.0)
    for labels, value in _samples(text, family):
        if value >= found[1]:
            found = labels, value
    return found[0]


def _started(text: bytes) -> str:
    """Return the start time. Raises ``ValueError`` if several servers share the metrics."""
    values = _values(text, _STARTED)
    if not values:
        raise ValueError(
            f"its /metrics has no {_STARTED.decode()}: several API servers share them (--api-server-count)"
        )
    return f"{values[0]:.3f}"


def _kv_tokens(labels: dict[str, str]) -> int:
    """Return the KV tokens of one engine, from its size in tokens or in blocks."""
    size = labels.get("kv_cache_size_tokens", "")
    if size.isdecimal():
        return int(size)
    blocks = labels.get("num_gpu_blocks", "")
    return int(blocks) * int(labels["block_size"]) if blocks.isdecimal() else 0


def _names(text: str) -> frozenset[str]:
    return frozenset(one for one in text.split(",") if one)
