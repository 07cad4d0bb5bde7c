"""Options of ``corun serve`` that the engine does not need to know."""

import re
from dataclasses import dataclass

from ..errors import ConfigError
from .option import check_config, option

LOG_LEVELS = ("debug", "info", "warning", "error")
UNKNOWN_FIELDS = ("warn", "refuse", "ignore")


def _check_prefix(text: str, flag: str) -> None:
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text) is None:
        raise ConfigError(
            f"{flag} is {text!r}, must be letters, digits and underscores, with no digit first"
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
    port: int = option(8000, minimum=0, maximum=65535, help="Port to listen on; 0 = any free one.")
    served_model_name: tuple[str, ...] = option(
        (), metavar="NAME", help="Names of the base model in the API; default: its directory's."
    )
    api_key: tuple[str, ...] = option(
        (),
        metavar="KEY",
        one_each=True,
        help="A key that requests may carry as bearer token; without any, all are let in. Whoever "
        "lists processes sees it: the file or CORUN_API_KEY are safer.",
        check=_check_keys,
    )
    api_key_file: str | None = option(
        None, metavar="FILE", help="File with such keys, one on each line."
    )
    admin_key: tuple[str, ...] = option(
        (),
        metavar="KEY",
        one_each=True,
        help="A key with which adapters can be loaded, unloaded and pinned over HTTP, and all else "
        "done. Those of --api-key are then not enough for it.",
        check=_check_keys,
    )
    admin_key_file: str | None = option(
        None, metavar="FILE", help="File with such keys, one on each line."
    )
    allow_runtime_lora_updating: bool = option(
        False,
        help="Without an admin key: let whoever may ask for anything load, unload and pin adapters "
        "over HTTP.",
    )
    allowed_lora_dirs: tuple[str, ...] = option(
        (),
        metavar="DIR",
        help="Directories in which adapters loaded over HTTP must lie, links followed; with none, "
        "they may lie anywhere.",
    )
    metrics_need_key: bool = option(False, help="Ask for a key at /metrics, too.")
    health_needs_key: bool = option(
        False, help="Ask for a key at /health, /ready and /version, too."
    )
    chat_template: str | None = option(
        None,
        metavar="FILE",
        help="File with a Jinja chat template, instead of the tokenizer's own.",
    )
    max_body_mib: int = option(
        32, minimum=1, maximum=4096, help="Largest request body, in MiB; larger ones get a 413."
    )
    unknown_fields: str = option(
        "warn",
        choices=UNKNOWN_FIELDS,
        help="What becomes of a field in a body that is not known: it is ignored, with a line in "
        "the log, or refused, or ignored. One that is nearly a served one is always refused.",
    )
    max_json_depth: int = option(
        64, minimum=1, maximum=128, help="Objects and arrays in one another, in a request's body."
    )
    max_messages: int = option(
        4096, minimum=1, maximum=2**20, help="Messages of one conversation at most."
    )
    max_request_tokens: int = option(
        2**22,
        minimum=1,
        help="Prompts x choices x tokens of output that one request asks for at most.",
    )
    template_timeout_s: float = option(
        0.5,
        above=0,
        maximum=60,
        help="Seconds that a chat template may take; then the request is refused.",
    )
    max_template_chars: int = option(
        2**22, minimum=1, maximum=2**28, help="Characters that a chat template may make."
    )
    max_connections: int = option(
        4096,
        minimum=1,
        maximum=2**20,
        help="Connections that are served at once; requests on others get a 503.",
    )
    header_timeout_s: float = option(
        10.0,
        above=0,
        maximum=86400,
        help="Seconds in which the head of a request must have come; later ones get a 408.",
    )
    body_timeout_s: float = option(
        120.0,
        above=0,
        maximum=86400,
        help="Seconds in which the body of a request must have come; later ones get a 408.",
    )
    max_unsent_kib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="KiB that wait for one client to read them, before its answers wait, too.",
    )
    unsent_timeout_s: float = option(
        30.0,
        above=0,
        maximum=86400,
        help="Seconds in which such a client must have read as much; otherwise its connection is "
        "closed and its requests end.",
    )
    sse_keep_alive_s: float = option(
        15.0,
        minimum=0,
        maximum=86400,
        help="Seconds of silence in a stream after which a comment is written, so that nobody on "
        "the way closes it; 0 = never.",
    )
    drain_timeout_s: float = option(
        30.0,
        minimum=0,
        maximum=86400,
        help="Seconds that running requests get to finish after SIGTERM.",
    )
    metrics_prefix: str = option(
        "corun", check=_check_prefix, help="Prefix of the Prometheus names, e.g. vllm."
    )
    request_log: str | None = option(
        None,
        metavar="FILE",
        help="Write a line of JSON for each request that generates when it has ended: tokens, "
        "times, what it waited for, and how it ended; never a prompt or an answer. - = stdout.",
    )
    request_log_mib: int = option(
        64,
        minimum=1,
        maximum=2**20,
        help="Size at which that file becomes FILE.1, and older ones FILE.2 to FILE.4.",
    )
    log_level: str = option("info", choices=LOG_LEVELS, help="What is logged.")

    def __post_init__(self) -> None:
        check_config(self)
