"""Turns an adapter's conversations and texts into tokens, by its chat template and tokenizer.

The engine reads an adapter's conventions with its weights (``adapters/conventions.py``). The
template runs in the same sandbox as the model's own; tokens that its tokenizer adds are found in
texts as ``tokenizers`` finds them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import tokenizers

from ..adapters.conventions import NO_CONVENTIONS, TEMPLATE_NAME, AdapterConventions
from ..adapters.mix import LoRAMix, conventions_of_mix
from ..adapters.vocabulary import AddedToken, TokenDifferences
from ..engine.messages import ModelInfo
from ..errors import RequestError
from .chat_template import RENDER_ERRORS, ChatTemplate
from .codec import Codec
from .detokenizer import Decode
from .inputs import Lora, MadePrompt, lora_name_of
from .long_text import TextPiece
from .lora_client import LoraClient
from .special_stops import SpecialToken
from .tokenizer import Tokenizer

_Tokens = tuple[TokenDifferences, int]  # and the number of ids with an embedding
_MAX_TEMPLATES = 1024
_MAX_TOKENIZERS = 8  # one for each set of added tokens, each with its own vocabulary


# ``tokenizers`` gives new tokens the next free ids. The adapter may use other ids, so ids are
# translated in both directions.
class AddedTokensCodec:
    """See ``Codec``."""

    def __init__(
        self, codec: Codec, ids: Mapping[int, int], tokens: TokenDifferences, num_embeddings: int
    ) -> None:
        """``codec``: the base's with the added tokens; ``ids``: the adapter's ids, by the codec's.

        Without ``ids``, ``codec`` is the base's own, and no added token has an embedding.
        """
        self._codec = codec
        self.is_quick, self.has_chat_template = codec.is_quick, codec.has_chat_template
        self.special_tokens_map = codec.special_tokens_map
        self.with_tokens, self.render = codec.with_tokens, codec.render
        self.template = codec.template
        self._ids = {inner: outer for inner, outer in ids.items() if inner != outer}
        self._inner_ids = {outer: inner for inner, outer in self._ids.items()}
        self._added = {token.token_id: token.content for token in tokens.added}
        self._refused = set(tokens.missing_ids)
        self._refused.update(one for one in self._added if one >= num_embeddings)
        self._refused_texts = {} if ids else {text: one for one, text in self._added.items()}
        self._num_embeddings = num_embeddings

    def mark_ids(self) -> Mapping[str, int]:
        outer = {text: self._ids.get(one, one) for text, one in self._codec.mark_ids().items()}
        return {text: one for text, one in outer.items() if one not in self._refused}

    def special_tokens(self) -> Mapping[int, SpecialToken]:
        found = self._codec.special_tokens()
        return {self._ids.get(inner, inner): token for inner, token in found.items()}

    def added_tokens(self) -> Mapping[int, str]:
        found = self._codec.added_tokens()
        return {self._ids.get(inner, inner): content for inner, content in found.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises ``RequestError`` for a token that the base or the adapter lacks."""
        self._check_text(text)
        return self._outer(self._codec.encode(text, add_special_tokens=add_special_tokens))

    def encode_piece(self, text: str) -> TextPiece:
        """Raises ``RequestError`` as ``encode`` does."""
        self._check_text(text)
        piece = self._codec.encode_piece(text)
        return TextPiece(self._outer(piece.token_ids), piece.starts)

    def _check_text(self, text: str) -> None:
        for content, token_id in self._refused_texts.items():
            if content in text:
                raise self._refusal(token_id)

    def _outer(self, token_ids: list[int]) -> list[int]:
        """Return the adapter's ids for the codec's. Raises ``RequestError`` for a refused one."""
        if self._ids:
            token_ids = [self._ids.get(one, one) for one in token_ids]
        if not self._refused.isdisjoint(token_ids):
            raise self._refusal(next(one for one in token_ids if one in self._refused))
        return token_ids

    def decoding(self, *, skip_special_tokens: bool) -> Decode:
        decode = self._codec.decoding(skip_special_tokens=skip_special_tokens)
        inner_ids = self._inner_ids
        if not inner_ids:
            return decode

        def translated(token_ids: Sequence[int]) -> str:
            return decode([inner_ids.get(one, one) for one in token_ids])

        return translated

    def token_name(self, token_id: int) -> str | None:
        return self._codec.token_name(self._inner_ids.get(token_id, token_id))

    def _refusal(self, token_id: int) -> RequestError:
        content = self._added.get(token_id)
        if content is None:
            content = self._codec.token_name(token_id)
            why = "which the base's tokenizer has and the adapter's has not"
        else:
            why = (
                f"which the adapter's tokenizer has added (id {token_id}): the base model has "
                f"embeddings only of ids 0 to {self._num_embeddings - 1}"
            )
        return RequestError(f"the prompt contains the token {content!r}, {why}", param="prompt")


def with_added(base: Codec, tokens: TokenDifferences, num_embeddings: int) -> Codec:
    """Return ``base`` with the tokens of an adapter. Slow if one of them has an embedding."""
    if all(_is_text_alone(one, num_embeddings) for one in tokens.added):
        return AddedTokensCodec(base, {}, tokens, num_embeddings)
    codec, ids = base.with_tokens([_token(one) for one in tokens.added])
    outer = {ids[one.content]: one.token_id for one in tokens.added}
    return AddedTokensCodec(codec, outer, tokens, num_embeddings)


def _is_text_alone(token: AddedToken, num_embeddings: int) -> bool:
    """Whether the token is refused wherever its text occurs in a prompt."""
    return token.token_id >= num_embeddings and not (token.normalized or token.single_word)


def _token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


class Conventions:
    """The conventions of the base, or of one version of an adapter."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str | None = None,
        own: AdapterConventions = NO_CONVENTIONS,
        template: ChatTemplate | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Combine them.

        Args:
            tokenizer: Makes the tokens.
            name: The adapter's; None = the base.
            own: The adapter's own conventions.
            template: For its conversations; None = that of ``tokenizer``.
            waited_s: Seconds waited for its files to be read.
        """
        self.tokenizer = tokenizer
        self.digest = own.digest
        self.waited_s = waited_s
        self._name = name
        self._refusal = own.refusal
        self._own = own
        self._template = template

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens, if it differs from the base's."""
        return self._own.vocab_size

    def templates(self) -> list[tuple[str | None, str | None]]:
        """Return the templates of answers and of conversations, the adapter's before the base's.

        Either may be missing.
        """
        base = self.tokenizer.codec.template
        own = None if self._template is None else self._template.text
        return [(self._own.response_template, own), (base.response_template, base.text)]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_arguments: Any,
    ) -> str:
        if self._refusal is not None:
            raise RequestError(
                f"adapter {self._name!r} takes no messages: {self._refusal}; correct its files and "
                "load it again, or use /v1/completions",
                param="messages",
            )
        if self._template is None:
            if self._name is not None and not self.tokenizer.codec.has_chat_template:
                raise RequestError(
                    f"neither adapter {self._name!r} nor the model has a chat template; put "
                    f"{TEMPLATE_NAME} into the adapter's folder and load it again, give one with "
                    "--chat-template FILE, or use /v1/completions",
                    param="messages",
                )
            return self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_arguments,
            )
        try:
            return self._template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_arguments,
            )
        except RENDER_ERRORS as error:
            raise RequestError(
                f"the adapter's chat template refuses the messages: {error}", param="messages"
            ) from error


# A function that makes a prompt by the conventions of the version that serves the request.
MakePrompt = Callable[[Conventions], Awaitable[MadePrompt]]


class AdapterTokenizers:
    """Makes the conventions of adapters over one base, and caches their tokenizers."""

    def __init__(self, base: Tokenizer, loras: LoraClient, model: ModelInfo) -> None:
        self._base = base
        self._loras = loras
        self._model = model
        self._templates: dict[str, ChatTemplate] = {}  # by digest of the conventions
        self._tokenizers: dict[_Tokens, Tokenizer] = {}
        self._making: dict[_Tokens, asyncio.Task[Tokenizer]] = {}

    async def conventions_of(self, lora: Lora) -> Conventions:
        name = lora_name_of(lora)
        if name is None:
            return Conventions(self._base)
        began_s, waited_s = time.monotonic(), 0.0
        parts = [part for part, _ in lora.parts] if isinstance(lora, LoRAMix) else [name]
        found = []
        for part in parts:
            one = self._loras.conventions_of(part)
            if one is None:
                one = await self._loras.read_conventions_of(part, self._model.max_queue_s)
                waited_s = time.monotonic() - began_s
            found.append((part, one or NO_CONVENTIONS))
        own = conventions_of_mix(found)
        num_embeddings = own.vocab_size or self._model.vocab_size
        tokenizer = await self._tokenizer_of((own.tokens, num_embeddings))
        return Conventions(tokenizer, name, own, self._template_of(own), waited_s)

    def _template_of(self, own: AdapterConventions) -> ChatTemplate | None:
        if own.template is None:
            return None
        found = self._templates.get(own.digest)
        if found is None:
            named = {**self._base.codec.special_tokens_map, **own.special_tokens}
            special_tokens = {key: text for key, text in named.items() if text is not None}
            if len(self._templates) >= _MAX_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            found = self._templates[own.digest] = ChatTemplate(own.template, special_tokens)
        return found

    async def _tokenizer_of(self, tokens: _Tokens) -> Tokenizer:
        if not (tokens[0].added or tokens[0].missing_ids):
            return self._base
        found = self._tokenizers.get(tokens)
        if found is not None:
            return found
        task = self._making.get(tokens)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make(tokens))
            self._making[tokens] = task
            task.add_done_callback(lambda _: self._making.pop(tokens, None))
        return await asyncio.shield(task)

    async def _make(self, tokens: _Tokens) -> Tokenizer:
        codec = await asyncio.to_thread(with_added, self._base.codec, *tokens)
        if len(self._tokenizers) >= _MAX_TOKENIZERS:
            del self._tokenizers[next(iter(self._tokenizers))]
        made = self._tokenizers[tokens] = Tokenizer(codec, self._base.queue)
        return made
