"""What completions and chat completions share: the fields of a body, and the parsed request.

Structured output has fields of several servers, as synonyms: OpenAI's ``response_format``, and
those of vLLM, SGLang, llama.cpp and Ollama.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationInfo

from ..adapters.mix import LoRAMix
from ..errors import RequestError
from ..frontend.inputs import MadePrompt, lora_name_of
from ..sampling import SamplingParams, StructuredOutput
from ..tools.reader import AnswerReader
from .body import RequestModel, given
from .engine_port import ConventionsPort
from .errors import InvalidValueError
from .fields import ACCEPTED_STREAM_OPTIONS, FieldTable, RefusedField
from .json_values import wrong_type
from .responses import Envelope

Object = dict[str, Any]

_FORMATS = '"text", "json_object", "json_schema" or "structural_tag"'
_ONE_FORM = "JSON has one space after each comma and colon, and no other whitespace"
_KINDS: Mapping[str, str] = {  # by field, where the field is a schema, regex, grammar or choices
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
# The same for the fields of structured_outputs.
_PART_KINDS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_TABLES: Mapping[str, FieldTable] = {
    "structured_outputs": FieldTable(
        served=(*_PART_KINDS, "json_object"),
        accepted={"disable_fallback": "there is one implementation", "disable_any_whitespace": _ONE_FORM},
        refused={
            "disable_additional_properties": RefusedField(
                "write additionalProperties into the schema", (False,)
            ),
            "whitespace_pattern": RefusedField(_ONE_FORM),
        },
    )
}


class StructureFields(RequestModel):
    """The form of the answer: at most one of these."""

    nested: ClassVar = _TABLES

    response_format: Object | None = given(
        "The form of the answer: type text, json_object, or json_schema with json_schema.schema; "
        "also structural_tag with structures and triggers."
    )
    structured_outputs: Object | None = given(
        "One of json (a schema), regex, choice, grammar, structural_tag, json_object (true)."
    )
    guided_json: Object | str | None = given("A JSON schema of the answer.")
    guided_regex: str | None = given("A regular expression that the whole answer matches.")
    guided_choice: list[str] | None = given("The answer is one of these texts.")
    guided_grammar: str | None = given("A grammar of the answer, in llguidance's Lark or GBNF.")
    json_schema: Object | str | None = given("Another name for guided_json.")
    regex: str | None = given("Another name for guided_regex.")
    grammar: str | None = given("Another name for guided_grammar.")
    ebnf: str | None = given("Another name for guided_grammar.")
    format: Object | str | None = given('A JSON schema of the answer, or "json": any object.')
    structured_forced_tokens: bool | None = given(
        "Compute text that the form leaves no choice for at once, without drawing its tokens; default: true."
    )

    def structured_output(self) -> StructuredOutput | None:
        """Return the form of the answer; None = any text.

        Raises ``RequestError`` for two fields that differ.
        """
        if _NAMES.isdisjoint(self.model_fields_set):  # usual case
            return None
        found: StructuredOutput | None = None
        for one in self._given():
            if found is not None and (one.kind, one.text) != (found.kind, found.text):
                raise RequestError(
                    f"{found.field} and {one.field} are given and differ; give one of them", param=one.field
                )
            found = one
        return found

    def _given(self) -> Iterator[StructuredOutput]:
        if self.response_format is not None:
            found = _of_response_format(self.response_format)
            if found is not None:
                yield found
        if self.structured_outputs is not None:
            yield from _of_structured_outputs(self.structured_outputs)
        if self.format == "json":
            yield _any_object("format")
        elif self.format:
            yield _made("json_schema", self.format, "format")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and value != "":
                yield _made(kind, value, name)


_NAMES = frozenset(StructureFields.model_fields) - {"structured_forced_tokens"}


def _any_object(field: str) -> StructuredOutput:
    return StructuredOutput("json_object", "", field)


def _made(kind: str, value: object, field: str) -> StructuredOutput:
    """Return the value of a field as JSON, unless it is a text already."""
    text = value if isinstance(value, str) else json.dumps(value)
    return StructuredOutput(kind, text, field)


def _of_response_format(value: Object) -> StructuredOutput | None:
    """Return OpenAI's form; its name, description and strict change nothing.

    An object may have a schema, as in llama.cpp and LoRAX.
    """
    field, schema = "response_format", value.get("schema")
    match value.get("type"):
        case "text":
            return None
        case "json_object" if schema is None:
            return _any_object(field)
        case "json_object":
            return _made("json_schema", schema, field)
        case "json_schema":
            inner = value.get("json_schema")
            if not isinstance(inner, dict):
                raise wrong_type(f"{field}.json_schema", inner, "an object")
            schema = inner.get("schema")
            if not isinstance(schema, dict):
                raise wrong_type(f"{field}.json_schema.schema", schema, "an object")
            return _made("json_schema", schema, field)
        case "structural_tag":
            return _made("structural_tag", value, field)
        case kind:
            raise wrong_type(f"{field}.type", kind, _FORMATS)


def _of_structured_outputs(value: Object) -> Iterator[StructuredOutput]:
    field = "structured_outputs"
    any_object = value.get("json_object")
    if not isinstance(any_object, bool | None):
        raise wrong_type(f"{field}.json_object", any_object, "a boolean")
    if any_object:
        yield _any_object(f"{field}.json_object")
    for name, kind in _PART_KINDS.items():
        part = value.get(name)
        if part is None:
            continue
        path = f"{field}.{name}"
        if kind in ("regex", "grammar") and not isinstance(part, str):
            raise wrong_type(path, part, "a string")
        yield _made(kind, part, path)


# A text, token ids, or a function that makes it by the adapter's conventions.
Prompt = str | list[int] | Callable[[ConventionsPort], Awaitable[MadePrompt]]

# Fields that SamplingParams has under the same name.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
    "structured_forced_tokens",
)
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_INTEGERS = ("top_k",)
_MAX_ID_DIGITS = 12  # of a token id


def _check_stop(value: object) -> object:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type("stop", value, "a string or a list of strings")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_type(f"stop[{index}]", item, "a string")
    return value


def check_ids(value: object, info: ValidationInfo) -> object:
    """Find the first of many wrong token ids, which would each be described."""
    if isinstance(value, list) and not set(map(type, value)) <= {int}:
        index = next(at for at, item in enumerate(value) if type(item) is not int)
        raise wrong_type(f"{info.field_name}[{index}]", value[index], "a valid integer")
    return value


StopField = Annotated[str | list[str] | None, BeforeValidator(_check_stop)]


TokenIdsField = Annotated[list[int] | None, BeforeValidator(check_ids)]


class StreamOptions(RequestModel):
    """What a stream reports beside its text."""

    include_usage: bool | None = given("End with a chunk that has token counts.")
    continuous_usage_stats: bool | None = given("Token counts in every chunk, with include_usage.")


class LoraPart(RequestModel):
    """One of several adapters that answer together."""

    name: str
    scale: float | None = given("A factor on its effect; default: 1.")


LORA_FIELDS = FieldTable(
    served=tuple(LoraPart.model_fields),
    accepted={},
    refused={"id": RefusedField("write the adapter's name as name")},
)
LORA_FIELD = given(
    "Up to 4 adapters that answer together, each a name with a scale (default: 1), beside a name "
    "of the base model as model."
)


class SamplingFields(RequestModel):
    """The fields that completions, chats and responses serve."""

    nested: ClassVar = {"lora": LORA_FIELDS}

    model: str | None = given(
        "An adapter's name, base:adapter, or a name of the base model; default: the base model."
    )
    lora: list[LoraPart] | None = LORA_FIELD
    temperature: float | None = given("0 is greedy; default, also of the next four: the model's.")
    top_p: float | None = given("Sample from the most likely tokens that together have this probability.")
    top_k: int | None = given("Sample from this many of the most likely tokens; 0 or -1 = all.")
    min_p: float | None = given("Sample from tokens with at least this share of the highest probability.")
    repetition_penalty: float | None = given("Divides the logits of tokens that occurred; 1 = off.")
    presence_penalty: float | None = given("Subtracted from the logits of generated tokens.")
    frequency_penalty: float | None = given("Subtracted for each time a token was generated.")
    seed: int | None = given("The same seed gives the same tokens.")
    stop: StopField = given("Texts that end an answer; its text is cut before them.")
    stream: bool | None = given("Answer with server-sent events.")
    cache_salt: str | None = given("Only requests with the same salt share KV.")
    predicted_output_tokens: int | None = given(
        "The client's estimate of the output's tokens; default: the engine's own."
    )


class GenerationFields(StructureFields, SamplingFields):
    """The fields that completions and chats serve."""

    nested: ClassVar = {
        **StructureFields.nested,
        **SamplingFields.nested,
        "stream_options": FieldTable(
            served=tuple(StreamOptions.model_fields), accepted=ACCEPTED_STREAM_OPTIONS, refused={}
        ),
    }

    logit_bias: dict[str, float] | None = given("Added to the logits of tokens, by token id.")
    bad_words: list[str] | None = given("Texts that no choice contains, as token sequences.")
    allowed_token_ids: TokenIdsField = given("Sample from these tokens only.")
    prompt_logprobs: int | None = given(
        "Return the log-probability of each prompt token and of this many alternatives."
    )
    n: int | None = given("Choices for each prompt; default: 1.")
    max_tokens: int | None = given(
        "Most tokens of each choice; default: 16 for prompts, what fits for messages. "
        "0 = none, to score or echo the prompt."
    )
    max_completion_tokens: int | None = given("Another name for max_tokens.")
    min_tokens: int | None = given("Fewest tokens of each choice.")
    stop_token_ids: TokenIdsField = given("Tokens that end a choice.")
    ignore_eos: bool | None = given("Continue after an end-of-sequence token.")
    include_stop_str_in_output: bool | None = given(
        "Keep the text that ended a choice, including special tokens of a stop string."
    )
    skip_special_tokens: bool | None = given("Remove special tokens from texts; default: true.")
    stream_options: StreamOptions | None = given("What the stream reports beside its text.")
    return_timing: bool | None = given("Return where the time went.")
    return_token_ids: bool | None = given("Return the token ids of prompt and choices.")
    add_special_tokens: bool | None = given(
        "Add the model's special tokens to the prompt; default: true for prompts, false for "
        "messages, where the template adds them."
    )
    truncate_prompt_tokens: int | None = given(
        "Keep this many tokens at the prompt's end; -1 = what fits beside max_tokens."
    )

    @property
    def mix(self) -> LoRAMix | None:
        """The adapters that answer together; None = ``model`` says which answers."""
        parts = [(one.name, 1.0 if one.scale is None else one.scale) for one in self.lora or ()]
        return LoRAMix(parts) if parts else None

    def check_stream_options(self) -> None:
        """Raise ``HttpError`` for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError("stream_options is given but stream is not true", param="stream_options")

    @property
    def wants_stream_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each chunk of the stream has the token counts so far."""
        options = self.stream_options
        return self.wants_stream_usage and bool(options and options.continuous_usage_stats)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives to score for each prompt token; None = no scores."""
        return self.prompt_logprobs

    def sampling_params(
        self,
        model_defaults: Mapping[str, float],
        *,
        default_max_tokens: int | None,
        logprobs: int | None,
        logprobs_field: str,
    ) -> SamplingParams:
        """Combine the request's values with ``model_defaults`` (from generation_config.json).

        ``default_max_tokens`` None means as many as fit the context. Raises ``RequestError``, with
        the request's own field name as ``param``.
        """
        values: dict[str, Any] = {
            name: int(model_defaults[name]) if name in _INTEGERS else model_defaults[name]
            for name in _FROM_MODEL
            if name in model_defaults
        }
        for name in _SAMPLING_FIELDS:
            given = getattr(self, name)
            if given is not None:
                values[name] = given
        max_tokens, max_tokens_field = self._max_tokens()
        values["max_tokens"] = default_max_tokens if max_tokens is None else max_tokens
        values["logprobs"] = logprobs
        values["prompt_logprobs"] = self.num_prompt_logprobs
        values["logit_bias"] = self._biases()
        values["stop"] = self.stop
        values["stop_token_ids"] = self.stop_token_ids or ()
        values["structured_output"] = self.structured_output()
        try:
            return SamplingParams(**values)
        except RequestError as exc:
            names = {"max_tokens": max_tokens_field, "logprobs": logprobs_field}
            raise _renamed(exc, names) from None

    def check_scores(self, *, has_echo: bool = False) -> None:
        """Raise ``HttpError`` for scores of the prompt in a stream, which has no event for them."""
        name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo with logprobs"
        if self.stream and (self.prompt_logprobs is not None or has_echo):
            raise InvalidValueError(
                f"{name} is given but stream is true: streams do not show scores of prompts", param="stream"
            )

    def _biases(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) < _MAX_ID_DIGITS):
                raise wrong_type("logit_bias", key, "an object with token ids as keys")
        return {int(key): bias for key, bias in self.logit_bias.items()}

    def _max_tokens(self) -> tuple[int | None, str]:
        """Return the limit and the name under which the request gave it."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidValueError(
                f"max_tokens ({old}) and max_completion_tokens ({new}) differ; give one of them",
                param="max_completion_tokens",
            )
        return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One HTTP request: the engine requests that it needs, and the form of its answer."""

    body: GenerationFields
    envelope: Envelope
    adapter: str | LoRAMix | None  # None = the base model
    prompts: Sequence[Prompt]
    sampling: SamplingParams  # before a prompt is made by conventions, which can add to it
    echo: bool = False  # the answer's texts begin with the prompt
    reader: AnswerReader | None = None  # of a chat

    @property
    def adapter_name(self) -> str | None:
        return lora_name_of(self.adapter)

    @property
    def answers(self) -> AnswerReader:
        assert self.reader is not None, "not a chat"
        return self.reader


def _renamed(exc: RequestError, names: Mapping[str, str]) -> RequestError:
    name = names.get(exc.param or "")
    if name is None or name == exc.param:
        return exc
    return RequestError(str(exc).replace(str(exc.param), name, 1), param=name)
