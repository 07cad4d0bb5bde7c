"""The conventions of an adapter: chat template, end tokens, and tokens of its tokenizer.

They are part of its version, as its weights are, and are read with them. Plain data, and the
meaning of the files' contents; knows no files.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .vocabulary import AddedToken, BaseTokens, TokenDifferences, compare

TEMPLATE_NAME, TOKENIZER_NAME = "chat_template.jinja", "tokenizer.json"
PROCESSOR_TEMPLATE_NAME = "chat_template.json"  # written by processors of older releases
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"
ADDED_TOKENS_NAME = "added_tokens.json"
GENERATION_CONFIG_NAME = "generation_config.json"
CONVENTION_NAMES = (
    TEMPLATE_NAME,
    PROCESSOR_TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    SPECIAL_TOKENS_NAME,
    ADDED_TOKENS_NAME,
    GENERATION_CONFIG_NAME,
)
"""The files of an adapter's folder that are read beside configuration and weights."""

MAX_TEMPLATE_BYTES = 1 << 20

# Variables of templates, as in transformers.
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

Template = str | dict[str, str]  # one, or several by name


class AdapterConventions(msgspec.Struct, frozen=True, array_like=True):
    """The conventions of one version of an adapter. Empty = those of the base."""

    template: Template | None = None
    special_tokens: dict[str, str | None] = {}  # by their names in templates; None = it has none
    eos_token_ids: tuple[int, ...] = ()  # beside the base's
    tokens: TokenDifferences = TokenDifferences()
    response_template: str | None = None  # JSON
    refusal: str | None = None  # the reason, if its conversations are refused
    digest: str = ""  # of all other fields, hexadecimal; "" for those of the base
    vocab_size: int | None = None  # tokens that its weights have; None = as many as the base


NO_CONVENTIONS = AdapterConventions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConventionContents:
    """The contents of the files, as JSON types; empty where there is no file."""

    template: str | None = None  # of the file with the template alone
    processor_template: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    added_tokens: Mapping[str, Any]
    generation_config: Mapping[str, Any]


def conventions_of(
    contents: ConventionContents, tokenizer: TokenDifferences, base: BaseTokens
) -> tuple[AdapterConventions, list[str]]:
    """Return the conventions, and notes on them for the log.

    ``tokenizer``: the differences of the folder's ``tokenizer.json``. Raises ``ValueError`` for
    invalid contents.
    """
    template = _template(contents)
    listed = list(_listed_tokens(contents))
    tokens = _join(tokenizer, compare(None, listed, base), {token.token_id for token in listed})
    if tokens.reason is not None:
        what = f"its tokenizer is not the base's: {tokens.reason}"
        refusal = None if template is None else what
        return refused(refusal), [f"its chat template and end tokens are not used: {what}"]
    eos_token_ids, notes = _end_tokens(contents, tokens, base)
    special_tokens = {} if template is None else _special_tokens(contents)
    found = AdapterConventions(template, special_tokens, eos_token_ids, tokens, _response_template(contents))
    return _with_digest(found), notes


def refused(reason: str | None) -> AdapterConventions:
    """Return those of an adapter that serves only prompts; None = those of the base."""
    return NO_CONVENTIONS if reason is None else _with_digest(AdapterConventions(refusal=reason))


def with_vocabulary(found: AdapterConventions, vocab_size: int | None) -> AdapterConventions:
    """Return ``found`` for weights with so many tokens; None = as many as the base."""
    return _with_digest(msgspec.structs.replace(found, vocab_size=vocab_size, digest=""))


def _with_digest(found: AdapterConventions) -> AdapterConventions:
    if found == NO_CONVENTIONS:
        return NO_CONVENTIONS
    digest = hashlib.sha256(msgspec.json.encode(found, order="sorted")).hexdigest()
    return msgspec.structs.replace(found, digest=digest)


def _template(contents: ConventionContents) -> Template | None:
    """Return the template of its own file, else of the tokenizer, else of the processor."""
    if contents.template is not None:
        return contents.template
    of_tokenizer = _field_template(TOKENIZER_CONFIG_NAME, contents.tokenizer_config)
    if of_tokenizer is not None:
        return of_tokenizer
    return _field_template(PROCESSOR_TEMPLATE_NAME, contents.processor_template)


def _field_template(file: str, fields: Mapping[str, Any]) -> Template | None:
    source = fields.get("chat_template")
    if isinstance(source, list):
        try:
            source = {str(one["name"]): str(one["template"]) for one in source}
        except (TypeError, KeyError):
            raise _wrong(file, "chat_template", "a text or named texts") from None
    elif not isinstance(source, str | None):
        raise _wrong(file, "chat_template", "a text or named texts")
    num_bytes = sum(len(one.encode(errors="replace")) for one in _texts(source))
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"the chat_template of {file} has {num_bytes} bytes, and at most {MAX_TEMPLATE_BYTES} are read"
        )
    return source


def _response_template(contents: ConventionContents) -> str | None:
    """Return the JSON of the tokenizer's response template, if there is one."""
    found = contents.tokenizer_config.get("response_template")
    if found is None:
        return None
    text = json.dumps(found)
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"the response_template of {TOKENIZER_CONFIG_NAME} has {len(text)} bytes, and at most "
            f"{MAX_TEMPLATE_BYTES} are read"
        )
    return text


def _texts(source: Template | None) -> Sequence[str]:
    if source is None:
        return ()
    return (source,) if isinstance(source, str) else tuple(source.values())


def _listed_tokens(contents: ConventionContents) -> Iterator[AddedToken]:
    """Yield the added tokens in files beside the tokenizer itself."""
    decoder = contents.tokenizer_config.get("added_tokens_decoder") or {}
    try:
        for token_id, fields in decoder.items():
            yield msgspec.convert({**fields, "id": int(token_id)}, AddedToken)
    except (AttributeError, TypeError, ValueError):
        raise _wrong(TOKENIZER_CONFIG_NAME, "added_tokens_decoder", "tokens by id") from None
    for content, token_id in contents.added_tokens.items():
        try:
            yield msgspec.convert({"content": content, "id": token_id}, AddedToken)
        except ValueError:
            raise _wrong(ADDED_TOKENS_NAME, repr(content), "the id of a token") from None


def _join(
    tokenizer: TokenDifferences, listed: TokenDifferences, listed_ids: Collection[int]
) -> TokenDifferences:
    """Return both together; the tokenizer itself takes precedence."""
    known = {token.content for token in tokenizer.added}
    return TokenDifferences(
        (*tokenizer.added, *(token for token in listed.added if token.content not in known)),
        tuple(one for one in tokenizer.missing_ids if one not in listed_ids),
        tokenizer.reason or listed.reason,
    )


def _special_tokens(contents: ConventionContents) -> dict[str, str | None]:
    """Return the variables of templates, from the file that transformers uses."""
    config, mapped = contents.tokenizer_config, contents.special_tokens_map
    fields = {**mapped, **config} if "added_tokens_decoder" in config else {**config, **mapped}
    found: dict[str, str | None] = {}
    for name in _SPECIAL_TOKENS:
        if name in fields:
            texts = _token_texts(fields[name], name)
            found[name] = texts[0] if texts else None
    return found


def _end_tokens(
    contents: ConventionContents, tokens: TokenDifferences, base: BaseTokens
) -> tuple[tuple[int, ...], list[str]]:
    """Return the tokens that end its answers, and notes on named tokens that cannot."""
    ids = {**base.ids, **{token.content: token.token_id for token in tokens.added}}
    found, notes = dict[int, None](), list[str]()
    for fields in (contents.tokenizer_config, contents.special_tokens_map):
        for text in _token_texts(fields.get("eos_token"), "eos_token"):
            if ids.get(text, base.num_embeddings) < base.num_embeddings:
                found[ids[text]] = None
            else:
                notes.append(f"its eos_token {text!r} is no token of the base and ends no answer")
    found |= dict.fromkeys(_token_ids(contents.generation_config.get("eos_token_id")))
    of_base = (base.eos_token_id,)
    ends = tuple(one for one in found if 0 <= one < base.num_embeddings and one not in of_base)
    return ends, list(dict.fromkeys(notes))


def _token_texts(value: object, name: str) -> list[str]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    texts = [one.get("content") if isinstance(one, dict) else one for one in values]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {value!r:.100}, expected the text of a token")
    return [str(text) for text in texts]


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [one for one in values if type(one) is int]
    if len(ids) < len(values):
        raise _wrong(GENERATION_CONFIG_NAME, "eos_token_id", "ids of tokens")
    return ids


def _wrong(file: str, field: str, expected: str) -> ValueError:
    return ValueError(f"{field} in {file} is not {expected}")
