"""Options of ``corun serve`` that the engine does not need to know."""

import re
from dataclasses import dataclass

from ..errors import ConfigError
from .option import check_config, option

LOG_LEVELS = ("debug", "info", "warning", "error")


def _check_prefix(text: str, flag: str) -> None:
    if re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", text) is None:
        raise ConfigError(
            f"{flag} is {text!r}, must be letters, digits and underscores, with no digit first"
        )


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
    api_key: str | None = option(None, help="Bearer token that requests must carry.")
    chat_template: str | None = option(
        None,
        metavar="FILE",
        help="File with a Jinja chat template, instead of the tokenizer's own.",
    )
    max_body_mib: int = option(
        32, minimum=1, maximum=4096, help="Largest request body, in MiB; larger ones get a 413."
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
    log_level: str = option("info", choices=LOG_LEVELS, help="What is logged.")

    def __post_init__(self) -> None:
        check_config(self)
