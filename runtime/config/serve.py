"""Options of ``corun serve`` that the engine does not need to know."""

import re
from dataclasses import dataclass

from ..errors import ConfigError
from .option import check_config, option

LOG_LEVELS = ("debug", "info", "warning", "error")
UNKNOWN_FIELDS = ("warn", "refuse", "ignore")


def _check_prefix(text: str, flag: str) -> None:
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text) is None:
        raise ConfigError(f"{flag} is {text!r}, must be letters, digits and underscores, with no digit first")


def _check_origins(origins: tuple[str, ...], flag: str) -> None:
    for origin in origins:
        if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin) is None:
            raise ConfigError(
                f"{flag} is {origin!r}, must be * or a scheme, a host and perhaps a port, with no "
                "path or final slash, such as http://localhost:3000"
            )


def _check_keys(keys: tuple[str, ...], flag: str) -> None:
    for key in keys:
        if key != key.strip():  # as the header's is
            raise ConfigError(f"{flag} begins or ends with a space, which no request can send")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the HTTP front end.

    Raises ``ConfigError`` for a value of the wrong type or out of range.
    """

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int = option(8000, minimum=0, maximum=65535, help="Port to listen on; 0 = any free port.")
    served_model_name: tuple[str, ...] = option(
        (),
        metavar="NAME",
        help="Names of the base model in the API; default: its directory's name, or its hub id.",
    )
    api_key: tuple[str, ...] = option(
        (),
        metavar="KEY",
        help="Keys that clients send as bearer token; without one, all requests are accepted. "
        "MODEL comes before the flag. Users of this machine can see keys in the list of processes; "
        "--api-key-file and CORUN_API_KEY are safer.",
        check=_check_keys,
    )
    api_key_file: str | None = option(None, metavar="FILE", help="File with keys of --api-key, one per line.")
    admin_key: tuple[str, ...] = option(
        (),
        metavar="KEY",
        help="Keys that allow everything, including loading, unloading and pinning adapters over "
        "HTTP. Keys of --api-key then do not allow that.",
        check=_check_keys,
    )
    admin_key_file: str | None = option(
        None, metavar="FILE", help="File with keys of --admin-key, one per line."
    )
    allow_runtime_lora_updating: bool = option(
        False, help="Without an admin key, let every accepted client load, unload and pin adapters over HTTP."
    )
    allowed_lora_dirs: tuple[str, ...] = option(
        (),
        metavar="DIR",
        help="Directories that must contain adapters loaded over HTTP, after links are followed; "
        "default: any directory. Links in directories of adapters may lead to these directories, "
        "too.",
    )
    metrics_need_key: bool = option(False, help="Require a key for /metrics.")
    health_needs_key: bool = option(False, help="Require a key for /health, /ready and /version.")
    allowed_origins: tuple[str, ...] = option(
        (),
        metavar="ORIGIN",
        help="Origins of web pages that may call the API from a browser (CORS), such as "
        "http://localhost:3000; * = any. Default: only pages of the server itself.",
        check=_check_origins,
    )
    chat_template: str | None = option(
        None, metavar="FILE", help="File with a Jinja chat template that replaces the tokenizer's own."
    )
    response_template: str | None = option(
        None,
        metavar="FILE",
        help="File with a response template (JSON, as in transformers) that replaces the "
        "tokenizer's own. It says how answers are divided into content, reasoning and tool calls. "
        "Default: the tokenizer's, or that of a known family of models.",
    )
    max_body_mib: int | None = option(
        None,
        minimum=1,
        maximum=4096,
        help="Maximum size of a request body, in MiB; larger ones are refused (413). Default: 64 "
        "bytes for each token of --max-model-len, but at least 4 MiB and at most 32 MiB. A gateway "
        "has 32.",
    )
    max_bodies_mib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="Maximum size of all request bodies that are received or parsed at once, in MiB; "
        "beyond that, bodies of more than 64 KiB are refused (429).",
    )
    unknown_fields: str = option(
        "warn",
        choices=UNKNOWN_FIELDS,
        help="What happens to an unknown field of a request: warn = it is ignored and logged, "
        "refuse = the request is refused, ignore = it is ignored. A field that is almost "
        "named like a known one is always refused.",
    )
    max_json_depth: int = option(
        64, minimum=1, maximum=128, help="Maximum nesting of objects and arrays in a request body."
    )
    max_messages: int = option(
        4096, minimum=1, maximum=2**20, help="Maximum number of messages in a conversation."
    )
    max_content_parts: int = option(
        8192,
        minimum=1,
        maximum=2**20,
        help="Maximum number of content parts and tool calls in all messages of a conversation.",
    )
    max_json_items: int = option(
        2**18,
        minimum=1,
        maximum=2**28,
        help="Maximum number of values and names in all arrays and objects of a request body, or "
        "twice --max-model-len if that is more.",
    )
    max_tokenize_tokens: int = option(
        2**17,
        minimum=1,
        maximum=2**28,
        help="Maximum number of tokens that /tokenize returns and /detokenize takes, or "
        "--max-model-len if that is more.",
    )
    max_request_tokens: int = option(
        2**22, minimum=1, help="Maximum prompts x choices x output tokens of a request."
    )
    template_timeout_s: float = option(
        0.5,
        above=0,
        maximum=60,
        help="Maximum seconds of a processor that a chat template takes; then it is refused.",
    )
    max_template_chars: int = option(
        2**22, minimum=1, maximum=2**28, help="Maximum number of characters that a chat template produces."
    )
    max_hub_adapter_mib: int = option(
        2048,
        minimum=1,
        maximum=2**20,
        help="Maximum size of an adapter that --lora-resolver fetches from the hub, in MiB; a "
        "larger one is refused (400).",
    )
    max_hub_adapters: int = option(
        256,
        minimum=1,
        help="Maximum number of adapters from the hub that are served at once; more are refused (400).",
    )
    max_hub_gib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="Maximum size of all adapters in the hub's cache, in GiB; an adapter for "
        "which it has no room is refused (400).",
    )
    max_connections: int = option(
        4096,
        minimum=1,
        maximum=2**20,
        help="Maximum number of open connections; requests on more are refused (503).",
    )
    max_idle_connections: int = option(
        1024,
        minimum=0,
        maximum=2**20,
        help="Maximum number of idle connections of a client address; of more, the one that has "
        "been idle longest is closed (503). 0 = no limit. All clients behind a proxy have the "
        "proxy's address.",
    )
    header_timeout_s: float = option(
        10.0,
        above=0,
        maximum=86400,
        help="Maximum seconds until the head of a request has arrived; then it is refused (408).",
    )
    body_timeout_s: float = option(
        120.0,
        above=0,
        maximum=86400,
        help="Maximum seconds until the body of a request has arrived; then it is refused (408).",
    )
    max_unsent_kib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="Maximum KiB of answers that a client has not read; beyond that, its answers pause.",
    )
    unsent_timeout_s: float = option(
        30.0,
        above=0,
        maximum=86400,
        help="Seconds in which a client must read --max-unsent-kib while its answers pause; "
        "otherwise its connection is closed and its requests end.",
    )
    sse_keep_alive_s: float = option(
        15.0,
        minimum=0,
        maximum=86400,
        help="Seconds of silence in a stream after which a comment is sent, so that no proxy "
        "closes it; 0 = never.",
    )
    drain_timeout_s: float = option(
        30.0, minimum=0, maximum=86400, help="Seconds that running requests have to finish after SIGTERM."
    )
    metrics_prefix: str = option(
        "corun", check=_check_prefix, help="Prefix of Prometheus metric names, such as vllm."
    )
    request_log: str | None = option(
        None,
        metavar="FILE",
        help="File that gets a line of JSON for each generation request when it ends; - = stdout. "
        "A line has tokens, times, what the request waited for and how it ended, but no prompt and "
        "no answer.",
    )
    request_log_mib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="Size of the request log, in MiB, at which it becomes FILE.1, and older ones FILE.2 to FILE.4.",
    )
    log_level: str = option("info", choices=LOG_LEVELS, help="Lowest level that is logged.")

    def __post_init__(self) -> None:
        check_config(self)
