"""The families of adapters in ``/metrics``. Series are bounded: the rest counts as ``OTHER``."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from ..adapters.info import LEVELS, AdapterInfo, num_fitting
from ..adapters.mix import LoRAMix
from ..adapters.names import DRAINING, READY
from ..engine.messages import EngineStats
from .families import Families
from .histogram import FIRST_TOKEN_BOUNDS_S, Histogram

MAX_ADAPTER_SERIES = 256
MAX_ADAPTERS_IN_LABEL = 64
OTHER = "other"  # the label of all adapters without series of their own


_BY_ADAPTER = (
    ("lora_time_to_first_token_seconds", "histogram", "Time to first token, by adapter."),
    ("lora_prompt_tokens_total", "counter", "Tokens of answered prompts, by adapter."),
    ("lora_generation_tokens_total", "counter", "Tokens generated, by adapter."),
)


@dataclass(slots=True)
class AdapterCount:
    """Counts of one name."""

    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    _shown: tuple[int, int] = (-1, -1)  # tokens of the samples that were written last
    _samples: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    def samples(self, name: str, families: Families) -> tuple[bytes, bytes, bytes]:
        """Return the lines of each of ``_BY_ADAPTER``."""
        now = self.prompt_tokens, self.generation_tokens  # a first token counts a prompt, too
        if now != self._shown:
            self._shown = now
            labels = families.label_text({"adapter_name": name})
            first, prompt, generation = (families.name(family) for family, *_ in _BY_ADAPTER)
            buckets = self.first_token_s.buckets()
            lines = [f'{first}_bucket{{{labels},le="{le}"}} {count}' for le, count in buckets]
            lines += [
                f"{first}_count{{{labels}}} {buckets[-1][1]}",
                f"{first}_sum{{{labels}}} {self.first_token_s.total}",
                "",
            ]
            self._samples = (
                "\n".join(lines).encode(),
                f"{prompt}{{{labels}}} {self.prompt_tokens}.0\n".encode(),
                f"{generation}{{{labels}}} {self.generation_tokens}.0\n".encode(),
            )
        return self._samples


class AdapterCounts:
    """Counts by name; the first names have series of their own."""

    def __init__(self) -> None:
        self._counts: dict[str, AdapterCount] = {}

    def of(self, name: str | None) -> AdapterCount | None:
        """The counts of an adapter's requests; None for the base model."""
        if name is None:
            return None
        is_new = name not in self._counts
        if is_new and (len(self._counts) >= MAX_ADAPTER_SERIES or LoRAMix.named(name) is not None):
            name = OTHER
        return self._counts.setdefault(name, AdapterCount())

    def exposition(self, families: Families) -> bytes:
        """Return all as text: thousands of lines, few of them changed since the last scrape."""
        known = [count.samples(name, families) for name, count in self._counts.items()]
        text = b""
        for index, (name, kind, help_text) in enumerate(_BY_ADAPTER):
            title = families.name(name)
            text += f"# HELP {title} {help_text}\n# TYPE {title} {kind}\n".encode()
            text += b"".join([samples[index] for samples in known])
        return text


def adapter_families(
    families: Families, stats: EngineStats, adapters: Iterable[AdapterInfo], max_num_seqs: int
) -> Iterator[Metric]:
    """Yield the adapters in use, and the level of each adapter."""
    # One series with the time as its value: readers use the newest. There are no adapter
    # slots: each running request may use another adapter.
    labels = {
        "max_lora": str(max_num_seqs),
        "running_lora_adapters": ",".join(stats.running_adapters[:MAX_ADAPTERS_IN_LABEL]),
        "waiting_lora_adapters": ",".join(stats.waiting_adapters[:MAX_ADAPTERS_IN_LABEL]),
    }
    yield families.info(
        "lora_requests_info",
        "Adapters of running and waiting requests; the value is the Unix time.",
        labels,
        time.time(),
    )
    adapters = tuple(adapters)
    yield families.gauge(
        "max_gpu_lora_adapters",
        "Adapters that fit on the device with the running requests.",
        num_fitting(adapters, stats.adapter_room_bytes),
    )
    yield families.gauge(
        "lora_dir_unreadable_entries",
        "Entries of --lora-dir that cannot be read; their adapters stay as they are.",
        stats.num_unreadable_adapters,
    )
    yield families.gauge(
        "lora_dir_unseen_seconds",
        "Seconds since --lora-dir was last looked at; 0 if they are fewer than 30.",
        stats.lora_dir_unseen_s,
    )
    loaded = [one for one in adapters if one.state in (READY, DRAINING)]
    by_level = Counter(one.residency.level for one in loaded)
    for level in LEVELS:
        text = f"Adapters at the level {level}."
        yield families.gauge(f"num_{level}_loaded_lora_adapters", text, by_level[level])
    yield _loaded(families, loaded)


def _loaded(families: Families, loaded: Sequence[AdapterInfo]) -> Metric:
    """Adapters at faster levels come first among the series by name."""
    ranked = sorted(loaded, key=lambda one: (LEVELS.index(one.residency.level), one.name))
    shown, others = ranked[:MAX_ADAPTER_SERIES], ranked[MAX_ADAPTER_SERIES:]
    samples = [
        ((one.name, one.residency.level, str(one.pinned).lower(), str(one.rank)), 1.0) for one in shown
    ]
    by_level = Counter(one.residency.level for one in others)
    samples += [((OTHER, level, "", ""), float(number)) for level, number in by_level.items()]
    return families.gauges(
        "lora_adapter_loaded",
        f"Adapters by level, {MAX_ADAPTER_SERIES} by name.",
        ("adapter_name", "level", "pinned", "rank"),
        samples,
    )
