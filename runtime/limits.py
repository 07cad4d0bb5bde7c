"""Checks of requests against limits, with one error text for each limit. Pure.

A front end checks a request before it sends it to the engine. The scheduler checks it again.
"""

from dataclasses import dataclass
from typing import Any

from .errors import ContextLengthError, OverloadedError, RequestError, TooManySequencesError

MAX_QUEUES = 4  # queues of a scheduling policy (--queues); K_max of Chameleon, section 4.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of rendering a chat template."""

    timeout_s: float = 0.5
    max_chars: int = 4 << 20  # of the rendered text


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of HTTP clients. The defaults are those of the options."""

    max_body_bytes: int = 32 << 20
    max_json_depth: int = 64
    max_messages: int = 4096  # of a conversation
    max_logit_bias: int = 1024  # entries
    max_request_tokens: int = 4 << 20  # prompts x choices x tokens of output
    template: TemplateLimits = TemplateLimits()
    max_connections: int = 4096
    max_idle_connections: int = 1024  # of one client address; 0 = no limit
    header_timeout_s: float = 10.0  # for the head of a request
    body_timeout_s: float = 120.0  # for its body
    max_unsent_bytes: int = 64 << 10  # to one client, before its answers are paused
    unsent_timeout_s: float = 30.0  # in which a client must read these, or is disconnected


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """Limits of adapters that a hub resolver fetches. The defaults are those of the options."""

    max_adapter_bytes: int = 2 << 30  # of the files of one
    max_adapters: int = 256
    max_cache_bytes: int = 64 << 30  # of all in the hub's cache


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raise ``RequestError`` if the prompt is empty, ``ContextLengthError`` if it is too long."""
    if num_tokens == 0:
        raise RequestError("the prompt is empty: it has no tokens", param="prompt")
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"this model's maximum context length is {max_model_len} tokens: the prompt has "
            f"{num_tokens} tokens, at most {max_model_len - 1} leave room for one more "
            "(--max-model-len)",
            param="prompt",
        )


def check_num_stops(num_stops: int, max_stop_strings: int) -> None:
    """Raise ``RequestError`` for too many stop strings."""
    if num_stops > max_stop_strings:
        raise RequestError(
            f"{num_stops} stop strings were given, at most {max_stop_strings} are served "
            "(--max-stop-strings)",
            param="stop",
        )


def check_num_biases(num_biases: int, max_logit_bias: int) -> None:
    """Raise ``RequestError`` for too many entries of ``logit_bias``."""
    if num_biases > max_logit_bias:
        raise RequestError(
            f"logit_bias has {num_biases} entries, at most {max_logit_bias} are served "
            "(--max-logit-bias)",
            param="logit_bias",
        )


def check_body(data: dict[str, Any], limits: HttpLimits) -> None:
    """Raise ``RequestError`` for a body that is too deep, or has too many messages or biases.

    This is checked before messages and biases are parsed, which is slow.
    """
    level: list[Any] = [data]
    for _ in range(limits.max_json_depth):
        level = [item for one in level for item in _containers(one)]
        if not level:
            break
    if level:
        raise RequestError(
            f"the body is more than {limits.max_json_depth} objects and arrays deep "
            "(--max-json-depth)"
        )
    messages = data.get("messages")
    if isinstance(messages, list) and len(messages) > limits.max_messages:
        raise RequestError(
            f"messages has {len(messages)} messages, at most {limits.max_messages} are served "
            "(--max-messages)",
            param="messages",
        )
    biases = data.get("logit_bias")
    if isinstance(biases, dict):
        check_num_biases(len(biases), limits.max_logit_bias)


def _containers(value: Any) -> list[Any]:
    """Return the objects and arrays in an object or array."""
    items = value.values() if isinstance(value, dict) else value
    if not {dict, list} & set(map(type, items)):  # a prompt may be millions of tokens
        return []
    return [item for item in items if isinstance(item, dict | list)]


def check_num_output_tokens(
    num_prompts: int, num_choices: int, max_tokens: int, *, max_request_tokens: int
) -> None:
    """Raise ``RequestError`` if one HTTP request has too many output tokens in all."""
    num_tokens = num_prompts * num_choices * max_tokens
    if num_tokens > max_request_tokens:
        raise RequestError(
            f"{num_prompts} prompts with {num_choices} choices of up to {max_tokens} tokens each "
            f"are {num_tokens} tokens, at most {max_request_tokens} are served for one request "
            "(--max-request-tokens)",
            param="max_tokens",
        )


def check_predicted_output(num_tokens: int | None) -> None:
    """Raise ``RequestError`` if a client's prediction is invalid; None = the engine predicts."""
    if num_tokens is not None and not 1 <= num_tokens < 2**31:
        raise RequestError(
            f"predicted_output_tokens is {num_tokens}, must be in [1, {2**31 - 1}]",
            param="predicted_output_tokens",
        )


def check_num_sequences(
    num_prompts: int, num_choices: int, *, max_num_seqs: int, max_num_waiting: int
) -> None:
    """Raise ``TooManySequencesError`` if a request has more sequences than can run and wait."""
    num_sequences = num_prompts * num_choices
    if num_sequences > max_num_seqs + max_num_waiting:
        raise TooManySequencesError(
            f"{num_prompts} prompts with {num_choices} choices each are {num_sequences} "
            f"sequences, the engine holds at most {max_num_seqs + max_num_waiting} "
            "(--max-num-seqs and --max-num-waiting together)",
            param="prompt" if num_prompts > num_choices else "n",
        )


def check_num_open(num_open: int, num_new: int, *, max_num_seqs: int, max_num_waiting: int) -> None:
    """Raise ``OverloadedError`` if new sequences exceed the limit of running and waiting ones."""
    limit = max_num_seqs + max_num_waiting
    if num_open + num_new > limit:
        raise OverloadedError(
            f"{num_open} requests are open and {num_new} more would exceed {limit}: "
            f"{max_num_seqs} running (--max-num-seqs) "
            f"and {max_num_waiting} waiting (--max-num-waiting)"
        )


def check_queue(num_waiting: int, max_num_waiting: int | None) -> None:
    """Raise ``OverloadedError`` if no further request may wait. ``max_num_waiting``: None = any."""
    if max_num_waiting is not None and num_waiting >= max_num_waiting:
        raise OverloadedError(
            f"{num_waiting} requests are waiting, the limit is {max_num_waiting} "
            "(--max-num-waiting)"
        )


def overdue_error(max_queue_s: float) -> OverloadedError:
    """Return the error of a request that has waited too long to begin."""
    return OverloadedError(
        f"the request waited {max_queue_s:g} s for its turn, which is the limit (--max-queue-s)"
    )
