"""Decides how the answers of one chat request are written and read."""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ..errors import NotServedError, RequestError
from ..frontend.outputs import CompletionOutput
from ..grammar.schema import json_rule
from ..sampling import SamplingParams, StructuredOutput
from .call_format import ANY_ARGUMENTS, PLAIN_CALLS, CallGrammar
from .families import AnswerFormat, family_format, format_of, mark_texts, plain_format
from .offer import CallMode, Tools
from .parser import ParserOptions, TemplateParser
from .parts import AnswerParser, AnswerPart, PlainParser
from .response_template import read_template

# Pairs of a response template and a chat template, either of which may be missing.
Templates = Sequence[tuple[str | None, str | None]]

_logger = logging.getLogger(__name__)


class AnswerReader:
    """Makes the parsers of a request's choices, and the grammar that they follow."""

    def __init__(
        self, tools: Tools | None, *, splits_reasoning: bool, shows_reasoning: bool, is_live: bool
    ) -> None:
        """Read answers of a request.

        Args:
            tools: None = answers have no calls.
            splits_reasoning: Reasoning is no content.
            shows_reasoning: Reasoning is not dropped.
            is_live: Parts are shown as they arrive.
        """
        self.tools = tools
        self._splits_reasoning = splits_reasoning
        self._shows_reasoning = shows_reasoning
        self._is_live = is_live
        self._format: AnswerFormat | None = None
        self._options = ParserOptions()
        self._prompt = self._marks = ""
        self._token_text: Callable[[int], str] = str
        self._shows_end = False

    def check_prompt(self, prompt: str) -> None:
        """Raise ``NotServedError`` if the chat template has left out a function."""
        for name in self.tools.parameters if self.tools is not None else ():
            if name not in prompt:
                raise NotServedError(
                    f"tools has the function {name!r}, which the chat template leaves out of the "
                    "prompt; serve the model with a chat template for tools (--chat-template FILE) "
                    'or write tool_choice "none"',
                    param="tools",
                )

    def begin(
        self,
        prompt: str,
        sampling: SamplingParams,
        templates: Templates,
        mark_ids: Mapping[str, int],
        hides: Callable[[str], bool],
        token_text: Callable[[int], str],
    ) -> SamplingParams:
        """Begin answers to ``prompt``, and return how they are sampled. Raises ``RequestError``.

        Args:
            prompt: As the chat template has rendered it.
            sampling: As the request has it.
            templates: The adapter's before the base's.
            mark_ids: Added tokens that no free text of a grammar matches, by their texts.
            hides: Whether ``skip_special_tokens`` removes a part of a text.
            token_text: The text of a token, also of a special one.
        """
        self._prompt = prompt
        self._format = self._format_of(templates)
        self._marks = "" if self._format is None else mark_texts(self._format.template)
        self._token_text = token_text
        self._shows_end = sampling.include_stop_str_in_output
        if self._format is None:
            return sampling
        tools = self.tools
        self._options = ParserOptions(
            with_calls=tools is not None,
            with_reasoning=self._splits_reasoning,
            shows_reasoning=self._shows_reasoning,
            is_live=self._is_live,
            max_calls=None if tools is None or tools.is_parallel else 1,
            parameters={} if tools is None else tools.parameters,
        )
        structure = self._structure(self._format, sampling.structured_output, mark_ids)
        if structure is None and sampling.structured_output is not None:
            # It describes the whole answer, as there is no form of reasoning before it.
            self._format, structure = None, sampling.structured_output
        elif sampling.skip_special_tokens and hides(self._marks):
            sampling = dataclasses.replace(sampling, skip_special_tokens=False)
        return dataclasses.replace(sampling, structured_output=structure)

    def parser(self) -> AnswerParser:
        """Return the parser of a new choice, once its prompt has been made."""
        if self._format is None:
            return PlainParser()
        return TemplateParser(self._format.template, self._options, self._prompt)

    def whole(self, choice: CompletionOutput) -> list[AnswerPart]:
        parser = self.parser()
        return [*parser.feed(choice.text), *self.rest(parser, choice)]

    def rest(self, parser: AnswerParser, choice: CompletionOutput) -> list[AnswerPart]:
        """Return the last parts of a choice that has ended; ``parser`` has all of its text."""
        return [*parser.feed(self._end_mark(choice)), *parser.finish()]

    def _end_mark(self, choice: CompletionOutput) -> str:
        """Return the text of the token that has ended a choice, if it is a mark; else "".

        Texts are shown without it, and a response template may need it to end a field.
        """
        is_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
        tokens = choice.token_ids if is_token and not self._shows_end else []
        if not self._marks or not tokens:
            return ""
        text = self._token_text(tokens[-1])
        is_shown = choice.text.endswith(text)  # a grammar has ended with it, not an end token
        return text if text in self._marks and not is_shown else ""

    @staticmethod
    def finish_reason(reason: str | None, *, num_calls: int) -> str | None:
        return "tool_calls" if num_calls and reason == "stop" else reason

    @property
    def is_plain(self) -> bool:
        """Whether answers are content alone."""
        return self._format is None

    def _format_of(self, templates: Templates) -> AnswerFormat | None:
        """Return how the model writes answers; None if they are content alone."""
        known = _known_format(tuple(templates))
        tools = self.tools
        if isinstance(known, str):
            if tools is not None:
                raise RequestError(known, param="tools")
            return None
        if tools is None:
            is_split = known is not None and known.has_reasoning and self._splits_reasoning
            return known if is_split else None
        if tools.mode is CallMode.REQUIRED:
            return known if known is not None and known.calls is not None else plain_format(known)
        if known is None or not known.has_calls:
            raise NotServedError(
                'tool_choice is "auto", but the form of the model\'s calls is not known; give a '
                'response template (--response-template FILE), or write "required", "none" or a '
                "function as tool_choice",
                param="tool_choice",
            )
        return known

    def _structure(
        self, known: AnswerFormat, given: StructuredOutput | None, mark_ids: Mapping[str, int]
    ) -> StructuredOutput | None:
        """Return the form of answers; None = any, or one without reasoning."""
        tools = self.tools
        content = None if given is None else _content_rule(given)
        has_reasoning = self._options.with_reasoning and known.reasoning is not None
        parser = TemplateParser(known.template, self._options, self._prompt)
        grammar = CallGrammar(
            calls=known.calls or PLAIN_CALLS,
            functions={} if tools is None else tools.schemas,
            is_parallel=tools is None or tools.is_parallel,
            reasoning=known.reasoning if has_reasoning else None,
            is_reasoning=parser.is_reasoning,
            opens_content=known.opens_content,
            mark_ids=mark_ids,
        )
        if tools is None:
            text = None if content is None else grammar.without_calls(content)
        elif tools.mode is CallMode.REQUIRED:
            text = grammar.forced()
        elif given is not None:
            calls = known.calls
            if content is None or calls is None or calls.trigger is None:
                raise NotServedError(
                    f"{given.field} is not served beside tools for this model, whose calls can not "
                    'be distinguished from it; write tool_choice "required" or "none"',
                    param=given.field,
                )
            text = grammar.instead_of(content)
        elif tools.is_constrained and known.calls is not None:
            text = grammar.optional()
        else:
            text = None
        field = "tools" if tools is not None else "" if given is None else given.field
        return None if text is None else StructuredOutput("grammar", text, field)


def _content_rule(structure: StructuredOutput) -> str | None:
    """Return the rule of a grammar for ``structure``; None if it has no such rule, or is wrong."""
    if structure.kind == "json_object":
        return json_rule(ANY_ARGUMENTS)
    if structure.kind not in ("json_schema", "choice"):
        return None
    try:
        value = json.loads(structure.text)
    except (ValueError, RecursionError):  # the engine's client names the mistake
        return None
    if structure.kind == "json_schema":
        return json_rule(value) if isinstance(value, dict) else None
    is_texts = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
    return " | ".join(map(json.dumps, value)) if is_texts else None


@lru_cache(maxsize=1024)
def _known_format(templates: Templates) -> AnswerFormat | str | None:
    """Return the format of the first of ``templates`` with one; a text = why it cannot be read."""
    for index, (response_template, chat_template) in enumerate(templates):
        if response_template is not None:
            try:
                chats = [one for _, one in templates[index:] if one is not None]
                return format_of(read_template(response_template), chats[0] if chats else None)
            except ValueError as error:
                reason = f"the model's response template cannot be read: {error}"
                _logger.warning("%s; answers are not parsed, and tools are refused", reason)
                return reason
        found = None if chat_template is None else family_format(chat_template)
        if found is not None:
            return found
    return None
