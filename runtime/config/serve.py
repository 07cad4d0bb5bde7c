"""Options of ``corun serve`` that the engine does not need to know."""

from dataclasses import dataclass

from .option import option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the HTTP front end."""

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int = option(8000, help="Port to listen on; 0 = any free one.")
    served_model_name: tuple[str, ...] = option(
        (), metavar="NAME", help="Names of the base model in the API; default: its directory's name."
    )
    api_key: str | None = option(None, help="Bearer token that requests must carry.")
    chat_template: str | None = option(
        None, help="File with a Jinja chat template, instead of the tokenizer's own."
    )
    drain_timeout_s: float = option(
        30.0, help="Seconds that running requests get to finish after SIGTERM."
    )
    metrics_prefix: str = option("corun", help="Prefix of the Prometheus names, e.g. vllm.")
    log_level: str = option("info", choices=LOG_LEVELS, help="What is logged.")
