"""Checks of requests against limits, with one error text for each limit. Pure.

A front end checks a request before it sends it to the engine. The scheduler checks it again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .errors import ContextLengthError, OverloadedError, RequestError, TooManySequencesError

_MAX_WHOLE_CHARS = 16  # of a text that cannot be tokenized in parts, for each token of the limit
_MIN_WHOLE_TOKENS = 16_384
MAX_DEFAULT_BODY_BYTES = 32 << 20
_MIN_DEFAULT_BODY_BYTES = 4 << 20
_BODY_BYTES_PER_TOKEN = 64  # of the context
MAX_BAD_WORDS = 128
MAX_STRUCTURE_BYTES = 64 << 10  # of a schema, regex or grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits of rendering a chat template."""

    timeout_s: float = 0.5
    max_chars: int = 4 << 20  # of the rendered text


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of HTTP clients. The defaults are those of the options."""

    max_body_bytes: int = MAX_DEFAULT_BODY_BYTES
    max_bodies_bytes: int = 64 << 20  # of all bodies that are received or parsed
    max_json_depth: int = 64
    max_messages: int = 4096  # of a conversation
    max_content_parts: int = 8192  # of all messages, with their tool calls
    max_json_items: int = 1 << 18  # values and names of all arrays and objects of a body
    max_logit_bias: int = 1024  # entries
    max_stop_strings: int = 16
    max_stop_bytes: int = 16 << 10  # of all stop strings
    max_bad_words_bytes: int = 64 << 10  # of all bad words
    max_tokenize_tokens: int = 1 << 17  # of /tokenize and /detokenize
    vocab_size: int = 1 << 31  # the model's; lists of token ids are not longer
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


def default_body_bytes(max_model_len: int) -> int:
    """Return the largest body that is accepted by default, which is parsed quickly."""
    num_bytes = _BODY_BYTES_PER_TOKEN * max_model_len
    return min(max(num_bytes, _MIN_DEFAULT_BODY_BYTES), MAX_DEFAULT_BODY_BYTES)


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The tokens that a text may have, so that longer texts are refused while they are tokenized.

    ``num_kept``: only so many of its last tokens are used; None = all.
    """

    max_tokens: int
    error: Callable[[], RequestError]  # of a text with more
    num_kept: int | None = None


def prompt_limit(max_model_len: int, num_kept: int | None = None) -> TextLimit:
    """Return the limit of a prompt of which the last ``num_kept`` tokens are used (None = all)."""
    return TextLimit(max_model_len - 1, partial(_long_prompt_error, max_model_len), num_kept)


def tokenize_limit(max_tokens: int, param: str = "prompt") -> TextLimit:
    """Return the limit of a text whose tokens are an answer; ``param``: its field."""
    return TextLimit(max_tokens, partial(_long_text_error, max_tokens, param))


def _long_prompt_error(max_model_len: int) -> RequestError:
    return ContextLengthError(
        f"this model's maximum context length is {max_model_len} tokens: the prompt has more than "
        f"{max_model_len - 1} tokens, at most {max_model_len - 1} leave room for one more "
        "(--max-model-len)",
        param="prompt",
    )


def _long_text_error(max_tokens: int, param: str) -> RequestError:
    return RequestError(
        f"the text has more than {max_tokens} tokens, the limit of --max-tokenize-tokens", param=param
    )


def check_whole_text(num_chars: int, limit: TextLimit) -> None:
    """Raise ``RequestError`` for a text that cannot be tokenized in parts and is too long."""
    max_chars = _MAX_WHOLE_CHARS * max(limit.max_tokens, _MIN_WHOLE_TOKENS)
    if num_chars > max_chars:
        raise RequestError(
            f"the prompt has {num_chars} characters and cannot be tokenized in parts; such "
            f"prompts have at most {max_chars} characters (--max-model-len)",
            param="prompt",
        )


def check_waiting_chars(
    num_waiting: int, num_new: int, *, max_waiting_chars: int, retry_after_s: int
) -> None:
    """Raise ``OverloadedError`` if a text would wait behind too many characters of others."""
    if num_waiting and num_waiting + num_new > max_waiting_chars:
        raise OverloadedError(
            f"{num_waiting} characters of other prompts wait to be tokenized and {num_new} more "
            f"would exceed {max_waiting_chars} (--max-waiting-chars); retry in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )


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


def check_stops(stops: Sequence[object], *, max_stop_strings: int, max_stop_bytes: int) -> None:
    """Raise ``RequestError`` for too many or too long stop strings; ignores what is no string."""
    if len(stops) > max_stop_strings:
        raise RequestError(
            f"{len(stops)} stop strings were given, at most {max_stop_strings} are served "
            "(--max-stop-strings)",
            param="stop",
        )
    num_bytes = _num_bytes(stops)
    if num_bytes > max_stop_bytes:
        raise RequestError(
            f"the stop strings have {num_bytes} bytes together, at most {max_stop_bytes} are "
            "served (--max-stop-bytes)",
            param="stop",
        )


def check_num_bad_words(num_words: int) -> None:
    """Raise ``RequestError`` for too many bad words."""
    if num_words > MAX_BAD_WORDS:
        raise RequestError(
            f"{num_words} bad words were given, at most {MAX_BAD_WORDS} are served", param="bad_words"
        )


def check_structure_bytes(text: str, param: str) -> None:
    """Raise ``RequestError`` for a schema, regex or grammar that is too long; ``param``: its field.

    Also raises it for a text that is not valid Unicode.
    """
    num_bytes = len(text)
    if num_bytes <= MAX_STRUCTURE_BYTES:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} is not valid Unicode: {error.reason} at character {error.start}", param=param
            ) from None
    if num_bytes > MAX_STRUCTURE_BYTES:
        raise RequestError(
            f"{param} has {num_bytes} bytes or more, at most {MAX_STRUCTURE_BYTES} are served", param=param
        )


def check_bad_words(words: Sequence[object], *, max_bad_words_bytes: int) -> None:
    """Raise ``RequestError`` for too many or too long bad words; ignores what is no string."""
    check_num_bad_words(len(words))
    num_bytes = _num_bytes(words)
    if num_bytes > max_bad_words_bytes:
        raise RequestError(
            f"the bad words have {num_bytes} bytes together, at most {max_bad_words_bytes} are "
            "served (--max-bad-words-bytes)",
            param="bad_words",
        )


def _num_bytes(texts: Sequence[object]) -> int:
    """Return the bytes of all strings in UTF-8."""
    return sum(len(text.encode(errors="replace")) for text in texts if isinstance(text, str))


def check_num_ids(name: str, num_ids: int, vocab_size: int) -> None:
    """Raise ``RequestError`` if a list of token ids is longer than the vocabulary."""
    if num_ids > vocab_size:
        raise RequestError(f"{name} has {num_ids} entries, the vocabulary has {vocab_size}", param=name)


def check_num_detokenized(num_tokens: int, max_tokenize_tokens: int) -> None:
    """Raise ``RequestError`` for too many tokens to make a text of."""
    if num_tokens > max_tokenize_tokens:
        raise RequestError(
            f"tokens has {num_tokens} token ids, at most {max_tokenize_tokens} are served "
            "(--max-tokenize-tokens)",
            param="tokens",
        )


def check_num_biases(num_biases: int, max_logit_bias: int) -> None:
    """Raise ``RequestError`` for too many entries of ``logit_bias``."""
    if num_biases > max_logit_bias:
        raise RequestError(
            f"logit_bias has {num_biases} entries, at most {max_logit_bias} are served (--max-logit-bias)",
            param="logit_bias",
        )


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
            f"{num_waiting} requests are waiting, the limit is {max_num_waiting} (--max-num-waiting)"
        )


def overdue_error(max_queue_s: float) -> OverloadedError:
    """Return the error of a request that has waited too long to begin."""
    return OverloadedError(
        f"the request waited {max_queue_s:g} s for its turn, which is the limit (--max-queue-s)"
    )
