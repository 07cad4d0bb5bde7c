"""Options of ``corun cluster`` and ``corun gateway`` beside those of ``corun serve``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError
from .option import check_config, option

_CLUSTER = ("cluster",)
_ADD = ("cluster", "cluster add")
_GATEWAY = ("cluster", "gateway")
# Commands for a running cluster.
_ASKING = ("cluster status", "cluster add", "cluster remove", "cluster drain")
_KEYED = ("cluster", "gateway", *_ASKING)
_LIMITS = ("max_num_batched_tokens", "max_num_seqs")
_MAX_LIMIT = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)

# Types of engines. Those of the first type report their own profile.
ENGINE_KINDS = ("corun", "vllm")

# Options of ``corun serve`` that a cluster does not have, and what it has instead.
NOT_FOR_CLUSTERS: Mapping[str, str] = {
    "lora_resolver": "adapters are found in its registry; load them over HTTP",
    "lora_state_file": "its registry keeps adapters (--state-dir)",
    "watch_lora_dir": "adapters are loaded over HTTP, and from --lora-dir at start",
    "preload": "engines load adapters on first use",
    "engine_cores": "it divides the cores of its machine itself",
    "cpu_cores": "it divides the cores of its machine itself",
}


def check_url(text: str, flag: str) -> str:
    """Return the URL of a server without its path. Raises ``ConfigError`` that names ``flag``."""
    parts = urlsplit(text.rstrip("/").removesuffix("/v1"))
    try:
        is_url = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.path or parts.query:
        raise ConfigError(f"{flag} is {text!r}, expected something like http://10.0.0.2:8000")
    return f"http://{parts.netloc}"


@dataclass(frozen=True, slots=True)
class GivenEngine:
    """An engine that runs already, as ``--engine`` describes it."""

    url: str
    kind: str = ENGINE_KINDS[0]
    # For engines of other types: directory or hub id of the base model, and the limits that the
    # server was started with, which it does not report. Defaults are those of vLLM.
    model: str | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256


def parse_engine(text: str, flag: str = "--engine") -> GivenEngine:
    """Read URL or URL,kind=KIND,model=MODEL. Raises ``ConfigError`` that names ``flag``."""
    url, *pairs = text.split(",")
    given: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "profile":
            raise ConfigError(
                f"{flag} {url}: profile=FILE is not used any more: costs are learned from the "
                "server's answers; write model=MODEL, the base model's directory or hub id"
            )
        if key not in ("kind", "model", *_LIMITS) or not value:
            raise ConfigError(
                f"{flag} is {text!r}, must be URL or URL,kind=KIND,model=MODEL, and may have "
                f"{' and '.join(f'{name}=N' for name in _LIMITS)}"
            )
        given[key] = _limit(value, f"{flag} {url}: {key}") if key in _LIMITS else value
    engine = GivenEngine(check_url(url, flag), **given)
    if engine.kind not in ENGINE_KINDS:
        known = ", ".join(ENGINE_KINDS)
        raise ConfigError(f"{flag} {engine.url}: kind is {engine.kind!r}, must be one of {known}")
    if engine.kind == ENGINE_KINDS[0] and given.keys() - {"kind"}:
        raise ConfigError(
            f"{flag} {engine.url}: model and limits are for kind=vllm; a corun engine reports them"
        )
    if engine.kind != ENGINE_KINDS[0] and engine.model is None:
        raise ConfigError(
            f"{flag} {engine.url}: kind={engine.kind} needs model=MODEL, the directory or hub id "
            "of its base model"
        )
    return engine


def _limit(text: str, what: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MAX_LIMIT:
        raise ConfigError(f"{what} is {text!r}, must be a whole number from 1 to {_MAX_LIMIT}")
    return int(text)


def _check_engines(texts: tuple[str, ...], flag: str) -> None:
    urls = [parse_engine(text, flag).url for text in texts]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"{flag} names {url} twice")


def check_ray(text: str | None, flag: str) -> tuple[str, int] | None:
    """Return host and port of Ray's control store. Raises ``ConfigError``."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host.strip("[]") or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} is {text!r}, expected HOST:PORT of Ray's head, such as 10.0.0.1:6379")
    return host.strip("[]"), int(port)


def _check_name(text: str, flag: str) -> None:
    if not _NAME.fullmatch(text):
        raise ConfigError(f"{flag} is {text!r}, must be letters, digits, '-', '_' and '.'")


def parse_min_copies(texts: tuple[str, ...], flag: str = "--min-copies") -> dict[str, int]:
    """Return the minimum number of copies of each adapter. Raises ``ConfigError``."""
    found: dict[str, int] = {}
    for text in texts:
        name, separator, number = text.rpartition("=")
        if not separator or not name or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"{flag} is {text!r}, must be NAME=K, with K from 1 on")
        if name in found:
            raise ConfigError(f"{flag} names {name!r} twice")
        found[name] = int(number)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Options of a cluster.

    Raises ``ConfigError`` for a value of the wrong type or out of range.
    """

    engines: int | None = option(
        None,
        minimum=1,
        maximum=1024,
        help="Number of engines on this machine, or with --ray on Ray's machines.",
        commands=_ADD,
    )
    engine: tuple[str, ...] = option(
        (),
        metavar="URL",
        one_each=True,
        help="URL of an engine that runs already, with the cluster's key as its --api-key and "
        "--admin-key. It must see the directories of adapters. A vLLM server is "
        "URL,kind=vllm,model=MODEL, with its base model's directory or hub id; "
        "max_num_batched_tokens=N and max_num_seqs=N are the values that it was started with.",
        check=_check_engines,
        commands=_ADD,
    )
    ray: str | None = option(
        None,
        metavar="HOST:PORT",
        help="Let Ray start the engines on its machines, which include this one; HOST:PORT as "
        "for ray start --address.",
        check=check_ray,
        commands=_CLUSTER,
    )
    cluster_name: str = option(
        "corun",
        metavar="NAME",
        help="With --ray: name by which this cluster finds its Ray actors.",
        check=_check_name,
        commands=_CLUSTER,
    )
    gateways: int = option(
        1, minimum=1, maximum=64, help="Number of gateway processes, which share one port.", commands=_GATEWAY
    )
    router: str = option(
        "predicted",
        metavar="NAME",
        help="Policy that chooses the engine of a request (predicted, toppings, loraserve, p2c, ...).",
        commands=_GATEWAY,
    )
    placement: str = option(
        "sticky",
        metavar="NAME",
        help="Policy that chooses which engines have which adapters' files (sticky, loraserve, "
        "everywhere, ...).",
        commands=_CLUSTER,
    )
    operating_points: str | None = option(
        None,
        metavar="FILE",
        help="Tokens per second that an engine holds at each rank of adapters, as corun simulate "
        "--operating-points writes them. --placement loraserve needs them. Default for sticky: "
        "estimated from the engines' profiles.",
        commands=_CLUSTER,
    )
    placement_interval_s: float = option(
        120.0,
        minimum=15,
        maximum=3600,
        help="Seconds after which the placement is planned again.",
        commands=_CLUSTER,
    )
    min_copies: tuple[str, ...] = option(
        (),
        metavar="NAME=K",
        one_each=True,
        help="Keep the files of an adapter for at least K engines.",
        check=parse_min_copies,
        commands=_CLUSTER,
    )
    adapter_cache_gib: float | None = option(
        None,
        above=0,
        help="Disk space for adapter files on this machine, in GiB; default: half of the free space.",
        commands=_CLUSTER,
    )
    state_dir: str | None = option(
        None,
        metavar="DIR",
        help="Directory of the cluster's registry, its key and adapter files; default: "
        "corun/cluster in XDG_STATE_HOME.",
        commands=("cluster", *_ASKING),
    )
    cluster_key_file: str | None = option(
        None,
        metavar="FILE",
        help="File with the key that the cluster's processes authenticate with; default: "
        "cluster.key in --state-dir, which is created if it is missing.",
        commands=_KEYED,
    )
    cluster_host: str = option(
        "127.0.0.1",
        help="Address of this machine on which controller, agent and engines listen for gateways "
        "and agents of other machines; with --ray, the address that leads to Ray's machines.",
        commands=_CLUSTER,
    )
    cluster_port: int = option(
        0, minimum=0, maximum=65535, help="Port of the controller; 0 = any free port.", commands=_CLUSTER
    )
    unpinned: bool = option(
        False,
        help="Do not divide the cores of this machine. Engines share them, and have no workers "
        "that compute LoRA deltas.",
        commands=_CLUSTER,
    )
    controller: str | None = option(
        None,
        metavar="URL",
        help="URL of the controller; default: the one that --state-dir names.",
        check=lambda url, flag: None if url is None else check_url(url, flag),
        commands=("gateway", *_ASKING),
    )

    def __post_init__(self) -> None:
        check_config(self)
