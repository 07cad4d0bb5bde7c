"""Which fields of a body mean something: served, accepted without effect, or refused.

A field that would change the answer is refused, one that cannot is accepted. The tables here list
both; the models of the bodies list the served fields. Any other field is unknown:
``--unknown-fields`` decides, but a misspelt name of a served field is always an error.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import NotServedError
from ..limits import HttpLimits
from ..near_names import near_names
from .errors import HttpError
from .json_values import MAX_SHOWN_CHARS, field_path, show
from .message_schema import MESSAGE_STRINGS

MAX_UNKNOWN_NAMES = 64  # of unknown fields, in one body and in the log
_MISS_CUTOFF = 0.85  # similarity at which an unknown name counts as a misspelt one

_logger = logging.getLogger(__name__)

_Unknown = set[tuple[str, int]]  # unknown names of one body, each with the id of its table


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the answer if it were served."""

    instead: str  # the reason, or what to write
    neutral: tuple[object, ...] = ()  # values, besides null, that have no effect


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """The fields of one kind of object."""

    served: Collection[str]
    accepted: Mapping[str, str]  # the reason why each changes no answer
    refused: Mapping[str, RefusedField]
    nested: Mapping[str, "FieldTable"] = field(default_factory=dict)  # of objects, by served name


TEXT_ALONE = "this server takes text only"
NO_HOSTED_TOOLS = "this server runs no tools; the client runs functions"
_NO_REASONING = "write the template's own variable into chat_template_kwargs"
_NO_SAMPLER = "there is no such sampler"
_ADAPTER_IN_MODEL = "write the adapter's name as model"
_CHAT = "send conversations to /v1/chat/completions"
_PROMPT = "send prompts to /v1/completions"
_ONE_LEVEL = "write its fields at the top level of the body"

# Each cannot change the answer: it is about accounts, storage, routing or scheduling.
ACCEPTED_FIELDS: Mapping[str, str] = {
    "user": "names the end user",
    "safety_identifier": "names the end user",
    "metadata": "labels stored completions; none are stored",
    "service_tier": "there is one tier of service",
    "prompt_cache_key": "cached KV is found by tokens",
    "prompt_cache_retention": "--memory-policy decides which KV stays cached",
    "prompt_cache_options": "--memory-policy decides which KV stays cached",
    "cache_prompt": "KV is always cached",
    "request_id": "the header x-request-id names a request",
    "rid": "the header x-request-id names a request",
    "guided_decoding_backend": "there is one implementation",
    "stream_reasoning": "streams always show reasoning as it is written",
}

REFUSED_FIELDS: Mapping[str, RefusedField] = {
    # OpenAI's.
    "functions": RefusedField("write tools", ([],)),
    "function_call": RefusedField("write tool_choice", ("none",)),
    "best_of": RefusedField("choices are not ranked; write n", (1,)),
    "suffix": RefusedField("fill-in-the-middle is not served", ("",)),
    "audio": RefusedField(TEXT_ALONE),
    "modalities": RefusedField(TEXT_ALONE, (["text"],)),
    "prediction": RefusedField(
        "predicted outputs are not served; write their length as predicted_output_tokens"
    ),
    "reasoning": RefusedField(_NO_REASONING),
    "web_search_options": RefusedField("web search is not served"),
    "store": RefusedField("completions are not stored", (False,)),
    "input": RefusedField(_CHAT),
    "instructions": RefusedField("write a message with the role system"),
    "max_output_tokens": RefusedField("write max_tokens"),
    # vLLM's.
    "use_beam_search": RefusedField("beam search is not served", (False,)),
    "length_penalty": RefusedField("beam search is not served", (1.0, 1)),
    "chat_template": RefusedField("templates come from the model or from --chat-template"),
    "documents": RefusedField("write them into the messages", ([],)),
    "mm_processor_kwargs": RefusedField(TEXT_ALONE, ({},)),
    "prompt_embeds": RefusedField("write the prompt as text or token ids"),
    "logits_processors": RefusedField("requests cannot carry code", ([],)),
    "return_tokens_as_token_ids": RefusedField("write return_token_ids", (False,)),
    "priority": RefusedField("--scheduling-policy sets the order of all requests", (0,)),
    "structural_tag": RefusedField("write it into structured_outputs"),
    # SGLang's.
    "lora_path": RefusedField(_ADAPTER_IN_MODEL),
    "session_params": RefusedField("sessions are not served; send the whole prompt", ({},)),
    "return_hidden_states": RefusedField("hidden states are not returned", (False,)),
    "no_stop_trim": RefusedField("write include_stop_str_in_output", (False,)),
    "max_new_tokens": RefusedField("write max_tokens"),
    "min_new_tokens": RefusedField("write min_tokens"),
    # LoRAX's and TGI's.
    "adapter_id": RefusedField(_ADAPTER_IN_MODEL),
    "adapter_source": RefusedField(_ADAPTER_IN_MODEL),
    "inputs": RefusedField("write prompt, or messages"),
    "parameters": RefusedField(_ONE_LEVEL, ({},)),
    "do_sample": RefusedField("write temperature: 0 is greedy"),
    "num_return_sequences": RefusedField("write n"),
    "num_beams": RefusedField("beam search is not served", (1,)),
    "stop_sequences": RefusedField("write stop", ([],)),
    "truncate": RefusedField("write truncate_prompt_tokens"),
    "typical_p": RefusedField(_NO_SAMPLER, (1.0, 1)),
    "no_repeat_ngram_size": RefusedField(_NO_SAMPLER, (0,)),
    "max_length": RefusedField("write max_tokens"),
    # llama.cpp's and Ollama's.
    "lora_name": RefusedField(_ADAPTER_IN_MODEL),
    "adapter": RefusedField(_ADAPTER_IN_MODEL),
    "n_predict": RefusedField("write max_tokens"),
    "num_predict": RefusedField("write max_tokens"),
    "n_probs": RefusedField("write logprobs", (0,)),
    "repeat_penalty": RefusedField("write repetition_penalty", (1.0, 1)),
    "mirostat": RefusedField(_NO_SAMPLER, (0,)),
    "dry_multiplier": RefusedField(_NO_SAMPLER, (0.0, 0)),
    "xtc_probability": RefusedField(_NO_SAMPLER, (0.0, 0)),
    "top_a": RefusedField(_NO_SAMPLER, (0.0, 0)),
    "tfs_z": RefusedField(_NO_SAMPLER, (1.0, 1)),
    "options": RefusedField(_ONE_LEVEL, ({},)),
    "images": RefusedField(TEXT_ALONE, ([],)),
    "system": RefusedField("write a message with the role system"),
    # Anthropic's, and fields that client libraries should have removed.
    "max_tokens_to_sample": RefusedField("write max_tokens"),
    "thinking": RefusedField(_NO_REASONING),
    "extra_body": RefusedField(_ONE_LEVEL, ({},)),
    # Served elsewhere.
    "lora": RefusedField("only routes that generate serve it", ([],)),
    "messages": RefusedField(_CHAT),
    "prompt": RefusedField(_PROMPT),
    "echo": RefusedField(_PROMPT, (False,)),
    "top_logprobs": RefusedField("write the number as logprobs", (0,)),
    "add_generation_prompt": RefusedField(_CHAT, (False,)),
    "continue_final_message": RefusedField(_CHAT, (False,)),
    "chat_template_kwargs": RefusedField(_CHAT, ({},)),
    "tools": RefusedField(_CHAT, ([],)),
    "tool_choice": RefusedField(_CHAT, ("none",)),
    "parallel_tool_calls": RefusedField(_CHAT, (True, False)),
    **dict.fromkeys(("reasoning_effort", "verbosity", "enable_thinking"), RefusedField(_CHAT)),
    **dict.fromkeys(("separate_reasoning", "include_reasoning"), RefusedField(_CHAT, (True, False))),
}

_TEXT_PART = FieldTable(
    served=("type", "text"),
    accepted={
        "cache_control": "KV is always cached",
        "annotations": "describes the text's source",
        "id": "names the part",
    },
    refused={
        name: RefusedField(TEXT_ALONE)
        for name in ("image_url", "image", "input_audio", "audio_url", "video_url", "file")
    },
)
MESSAGE_FIELDS = FieldTable(
    served=("role", "content", "tool_calls", *MESSAGE_STRINGS),
    accepted={
        "id": "names the message",
        "type": "is always that of a message",
        "status": "is always that of a complete message",
        "refusal": "no chat template uses it",
        "annotations": "describes the text's source",
        "cache_control": "KV is always cached",
        "provider_specific_fields": "no chat template uses it",
    },
    refused={
        "audio": RefusedField(TEXT_ALONE, ({},)),
        "images": RefusedField(TEXT_ALONE, ([],)),
        "function_call": RefusedField("write tool_calls", ({},)),
        "prefix": RefusedField("write continue_final_message beside the messages", (False,)),
        "partial": RefusedField("write continue_final_message beside the messages", (False,)),
    },
    nested={"content": _TEXT_PART},
)
ACCEPTED_STREAM_OPTIONS: Mapping[str, str] = {"include_obfuscation": "events are not padded"}


class UnknownFields:
    """Removes the fields of bodies that are not served, and counts unknown ones."""

    def __init__(self, policy: str, limits: HttpLimits) -> None:
        """``policy``: the value of ``--unknown-fields``."""
        self._policy = policy
        self.limits = limits
        self._lock = threading.Lock()  # large bodies are parsed in a thread
        self._logged: set[str] = set()
        self.num_seen = 0

    def sift(self, body: dict[str, Any], table: FieldTable) -> None:
        """Remove all fields from ``body`` that are not served.

        Raises ``NotServedError`` for a refused field unless its value has no effect: a client that
        wants a tool call must not get prose that looks like an answer. Raises ``HttpError`` for an
        unknown field that is refused or misspelt, and for too many unknown fields. Threads may call
        it at once.
        """
        self._sift(body, table, (), set())

    def _sift(
        self, data: dict[str, Any], table: FieldTable, at: tuple[int | str, ...], unknown: _Unknown
    ) -> None:
        for name in [name for name in data if name not in table.served]:
            value = data.pop(name)
            if name in table.accepted:
                continue
            refused = table.refused.get(name)
            if refused is None:
                self._record(name, table, (*at, name), unknown)
            elif value is not None and not _is_neutral(value, refused.neutral):
                path = field_path((*at, name))
                raise NotServedError(
                    f"{path} is not served: {refused.instead}{_allowed(refused.neutral)}", param=path
                )
        for name, nested in table.nested.items():
            value = data.get(name)
            if isinstance(value, dict):
                self._sift(value, nested, (*at, name), unknown)
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        self._sift(item, nested, (*at, name, index), unknown)

    def _record(
        self, name: str, table: FieldTable, location: tuple[int | str, ...], unknown: _Unknown
    ) -> None:
        path = field_path(location)
        seen = (name, id(table))  # a name may be near a field of one kind of object only
        if seen not in unknown:  # the comparison takes long
            unknown.add(seen)
            if len(unknown) > MAX_UNKNOWN_NAMES:
                raise _unknown(path, f"the body has more than {MAX_UNKNOWN_NAMES} unknown fields")
            near = near_names(name.lower().replace("-", "_"), table.served, cutoff=_MISS_CUTOFF)
            if near:
                raise _unknown(path, f"unknown field{near}")
        if self._policy == "refuse":
            raise _unknown(path, "unknown field (--unknown-fields)")
        shown = name[:MAX_SHOWN_CHARS]
        with self._lock:
            self.num_seen += 1
            is_new = shown not in self._logged and len(self._logged) < MAX_UNKNOWN_NAMES
            if is_new:
                self._logged.add(shown)
        if self._policy == "warn" and is_new:
            _logger.warning("ignored the unknown field %r (--unknown-fields)", path)


def _unknown(path: str, what: str) -> HttpError:
    message = f"{show(path)}: {what}"
    return HttpError(400, message, code="unknown_field", param=path)


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    """Compare types too, so that true does not equal 1."""
    return any(type(value) is type(other) and value == other for other in neutral)


def _allowed(neutral: tuple[object, ...]) -> str:
    shown = [repr(value).replace("'", '"') for value in neutral if not isinstance(value, bool)]
    return f" (only {' or '.join(shown)} is accepted)" if shown else ""
