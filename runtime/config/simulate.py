"""Options of ``corun simulate`` and ``corun plan`` beside those of the engine."""

from dataclasses import dataclass

from .notations import parse_num_bytes
from .option import OptionSpec, check_config, option

# Those of the engine that a simulated one has, too.
_OF_ENGINE = frozenset({
    "max_num_batched_tokens", "max_num_seqs", "block_size", "memory_gib", "memory_fraction",
    "memory_policy", "adapter_memory_fraction", "host_adapter_bytes", "host_kv_bytes",
    "prefix_cache", "scheduling_policy", "output_predictor", "slo_ttft_s", "refresh_s", "queues",
    "growth_headroom", "max_decode_gap_s", "profile", "load_strategy", "link_gib_per_s",
    "link_latency_us",
})  # fmt: skip
_SIMULATE = ("simulate",)
_PLAN = ("plan",)
_BOTH = _SIMULATE + _PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """What is simulated, and where the results go.

    Raises ``ConfigError`` for a value of the wrong type or out of range.
    """

    workload: str = option(
        "S1",
        help="What arrives: a name (S1, prod100, ...), or a file of yours (FILE.yaml, FILE.jsonl).",
        commands=_BOTH,
    )
    traces: str | None = option(
        None,
        metavar="DIR",
        help="Where traces of real traffic lie that recipes are drawn from; default: CORUN_TRACES.",
        commands=_BOTH,
    )
    rps: float | None = option(
        None,
        above=0,
        help="Requests per second; corun plan says how many servers bear them.",
        commands=_BOTH,
    )
    requests: int | None = option(
        None,
        minimum=1,
        maximum=10**7,
        help="Requests of a run; default: as the workload says, else 500.",
        commands=_BOTH,
    )
    seeds: int = option(
        3, minimum=1, maximum=1000, help="Runs of each kind, each with arrivals of its own.",
        commands=_BOTH,
    )  # fmt: skip
    jobs: int | None = option(
        None, minimum=1, maximum=1024, help="Processes; default: one for each CPU.", commands=_BOTH
    )
    percentile: float = option(
        95.0,
        above=0,
        maximum=99.99,
        help="Of first tokens, which the SLO is about.",
        commands=_BOTH,
    )
    servers: int = option(
        1, minimum=1, maximum=1000, help="Servers that share the load.", commands=_SIMULATE
    )
    router: str | None = option(
        None,
        metavar="NAME",
        help="Says which server a request goes to (predicted, toppings, p2c, ...); default with "
        "several servers: predicted.",
        commands=_SIMULATE,
    )
    placement: str | None = option(
        None,
        metavar="NAME",
        help="Plans which servers have which adapters' files (sticky, loraserve, random, "
        "contiguous, everywhere); default: they are where requests have brought them.",
        commands=_SIMULATE,
    )
    placement_every_s: float = option(
        30.0,
        above=0,
        maximum=86_400,
        help="So often a placement is planned anew.",
        commands=_SIMULATE,
    )
    routers: int = option(
        1,
        minimum=1,
        maximum=1000,
        help="Routers, to which requests come in turn; none knows what the others send.",
        commands=_SIMULATE,
    )
    state_age_s: float = option(
        0.0,
        minimum=0,
        maximum=3600,
        help="So old are servers' reports when routers get them; each reports 10 times a second.",
        commands=_SIMULATE,
    )
    store_bytes: str | None = option(
        None,
        metavar="BYTES",
        number_as_text=True,
        help="Room for adapters' files on each server, e.g. 40GiB, which takes what it lacks from "
        "the others; default: each has all files.",
        check=parse_num_bytes,
        commands=_SIMULATE,
    )
    peer_gib_per_s: float = option(
        1.2,
        above=0,
        maximum=1000,
        help="GiB per second of files from other servers, one after the other.",
        commands=_SIMULATE,
    )
    compare: tuple[str, ...] = option(
        (),
        metavar="OPTION=A,B",
        one_each=True,
        help="Simulate each of these values of an option.",
        commands=_SIMULATE,
    )
    sweep: str | None = option(
        None,
        metavar="rps=FROM:TO:STEP",
        help="Simulate each load from FROM to TO.",
        commands=_SIMULATE,
    )
    horizon_s: float = option(
        3600.0,
        above=0,
        maximum=10**7,
        help="Simulated seconds after the last arrival at which a run is cut; requests that have "
        "not ended by then are counted.",
        commands=_BOTH,
    )
    out: str | None = option(
        None, metavar="DIR", help="Where table, figures and pictures go.", commands=_SIMULATE
    )
    force: bool = option(
        False, help="Write to --out although it holds other results.", commands=_SIMULATE
    )
    quick: bool = option(
        False, help="Say what one server bears, and not what would change it.", commands=_PLAN
    )

    def __post_init__(self) -> None:
        check_config(self)


def takes(spec: OptionSpec, command: str) -> bool:
    """Whether ``corun COMMAND`` has the option."""
    is_simulated = command in _BOTH and spec.name in _OF_ENGINE
    return command == "serve" or command in spec.commands or is_simulated
