"""Options of ``corun simulate`` and ``corun plan`` beside those of the engine."""

from dataclasses import dataclass

from .notations import parse_num_bytes
from .option import OptionSpec, check_config, option

# Options of the engine that a simulated engine has, too.
_OF_ENGINE = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_seqs",
        "block_size",
        "memory_gib",
        "memory_fraction",
        "memory_policy",
        "adapter_memory_fraction",
        "host_bytes",
        "prefix_cache",
        "scheduling_policy",
        "output_predictor",
        "slo_ttft_s",
        "growth_headroom",
        "max_decode_gap_s",
        "profile",
        "load_strategy",
        "cold_priority",
        "max_assisted_stall",
        "link_gib_per_s",
        "link_latency_us",
    }
)
_SIMULATE = ("simulate",)
_PLAN = ("plan",)
_BOTH = _SIMULATE + _PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Options of a simulation.

    Raises ``ConfigError`` for a value of the wrong type or out of range.
    """

    workload: str = option(
        "S1",
        help="Workload to simulate: a name (S1, prod100, ...) or a file (FILE.yaml, FILE.jsonl).",
        commands=_BOTH,
    )
    traces: str | None = option(
        None,
        metavar="DIR",
        help="Directory with traces of real traffic that workloads draw from; default: CORUN_TRACES.",
        commands=_BOTH,
    )
    rps: float | None = option(
        None,
        above=0,
        help="Requests per second; corun plan computes how many servers hold this load.",
        commands=_BOTH,
    )
    requests: int | None = option(
        None,
        minimum=1,
        maximum=10**7,
        help="Number of requests per run; default: as the workload says, otherwise 500.",
        commands=_BOTH,
    )
    seeds: int = option(
        3,
        minimum=1,
        maximum=1000,
        help="Number of runs of each variant, each with its own arrivals.",
        commands=_BOTH,
    )
    jobs: int | None = option(
        None,
        minimum=1,
        maximum=1024,
        help="Number of processes that simulate; default: one per CPU.",
        commands=_BOTH,
    )
    percentile: float = option(
        95.0,
        above=0,
        maximum=99.99,
        help="Percentile of the time to first token that the SLO limits.",
        commands=_BOTH,
    )
    servers: int = option(
        1, minimum=1, maximum=1000, help="Number of servers that share the load.", commands=_SIMULATE
    )
    router: str | None = option(
        None,
        metavar="NAME",
        help="Policy that chooses the server of a request (predicted, toppings, p2c, ...); "
        "default with several servers: predicted.",
        commands=_SIMULATE,
    )
    placement: str | None = option(
        None,
        metavar="NAME",
        help="Policy that chooses which servers have which adapters' files (sticky, loraserve, "
        "random, contiguous, everywhere); default: a server fetches a file when a request needs "
        "it.",
        commands=_SIMULATE,
    )
    placement_every_s: float = option(
        30.0,
        above=0,
        maximum=86_400,
        help="Seconds after which the placement is planned again.",
        commands=_SIMULATE,
    )
    operating_points: str | None = option(
        None,
        metavar="FILE",
        help="Write the tokens per second that a server holds within --slo-ttft-s, for each rank "
        "of the workload's adapters alone, for corun cluster. Nothing else is simulated.",
        commands=_SIMULATE,
    )
    routers: int = option(
        1,
        minimum=1,
        maximum=1000,
        help="Number of routers. Requests go to them in turn, and none knows what the others send.",
        commands=_SIMULATE,
    )
    state_age_s: float = option(
        0.0,
        minimum=0,
        maximum=3600,
        help="Age of the reports of servers when routers receive them, in seconds; a server "
        "reports 10 times a second.",
        commands=_SIMULATE,
    )
    store_bytes: str | None = option(
        None,
        metavar="BYTES",
        number_as_text=True,
        help="Space for adapter files on each server, such as 40GiB; missing files come from "
        "other servers. Default: each server has all files.",
        check=parse_num_bytes,
        commands=_SIMULATE,
    )
    peer_gib_per_s: float = option(
        1.2,
        above=0,
        maximum=1000,
        help="Bandwidth at which a server fetches files from other servers, in GiB per second; it "
        "fetches one file at a time.",
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
        None, metavar="rps=FROM:TO:STEP", help="Simulate each load from FROM to TO.", commands=_SIMULATE
    )
    horizon_s: float = option(
        3600.0,
        above=0,
        maximum=10**7,
        help="Simulated seconds after the last arrival at which a run is cut; unfinished "
        "requests are counted.",
        commands=_BOTH,
    )
    out: str | None = option(
        None,
        metavar="DIR",
        help="Directory to write the table, figures and pictures to; it also keeps finished runs, "
        "so that an interrupted simulation continues.",
        commands=_SIMULATE,
    )
    force: bool = option(
        False, help="Write to --out even if it has results of other options.", commands=_SIMULATE
    )
    quick: bool = option(
        False, help="Compute the load of one server only, and not what would change it.", commands=_PLAN
    )

    def __post_init__(self) -> None:
        check_config(self)


def takes(spec: OptionSpec, command: str) -> bool:
    """Whether ``corun COMMAND`` has the option."""
    is_simulated = command in _BOTH and spec.name in _OF_ENGINE
    return command == "serve" or command in spec.commands or is_simulated
