"""Random walks through grammars of calls, over tokens: the texts are calls with valid arguments."""

import json
import random
from collections.abc import Iterator

import numpy as np
import pytest
import tokenizers
from corun.runtime.grammar.compile import compile_grammar, parser_limits
from corun.runtime.grammar.tokenizer import make_ll_tokenizer
from corun.runtime.sampling import StructuredOutput
from corun.runtime.tools.call_format import CallGrammar
from corun.runtime.tools.families import AnswerFormat, family_format, plain_format
from corun.runtime.tools.parser import ParserOptions, TemplateParser
from corun.runtime.tools.parts import ParsedAnswer, parsed
from llguidance import LLMatcher, LLTokenizer
from support.answer_samples import ADD, NOW, SAMPLES
from tokenizers import AddedToken, decoders, models, pre_tokenizers

MARKS = """
    <tool_call> </tool_call> [TOOL_CALLS] [ARGS] <|channel|> <|message|> <|end|> <|start|>
    <|constrain|>
""".split()
END = 256
MAX_TOKENS = 400
NUM_WALKS = 8


def byte_tokenizer(*, special: bool) -> tokenizers.Tokenizer:
    """A token is a byte, the end, or a mark; ``special``: marks are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken(one, special=special, normalized=False) for one in MARKS])
    return tokenizer


def walk(first: LLMatcher, backend: tokenizers.Tokenizer, rng: random.Random) -> str | None:
    """Return a text that the grammar allows; None if it has not ended after ``MAX_TOKENS``."""
    matcher, drawn = first.deep_copy(), list[int]()
    ends_texts = {END, *(backend.token_to_id(one) for one in ('"', "}", "]", *MARKS))}
    while len(drawn) < MAX_TOKENS and not matcher.is_stopped():
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        ending = [one for one in allowed if one in ends_texts]
        token = rng.choice(ending if ending and rng.random() < 0.3 else allowed)
        if token == END:
            break
        drawn.append(token)
        assert matcher.consume_token(token)
    else:
        if not matcher.is_stopped():
            return None
    return str(backend.decode(drawn, skip_special_tokens=False))


def answers(found: AnswerFormat, *, special: bool, forced: bool) -> Iterator[ParsedAnswer]:
    backend, rng = byte_tokenizer(special=special), random.Random(0)
    ids = backend.get_vocab(with_added_tokens=True)
    mark_ids = {one: ids[one] for one in MARKS if special or one[0] == "<"}
    assert found.calls is not None
    grammar = CallGrammar(
        calls=found.calls,
        functions={"add": ADD, "now": NOW},
        is_parallel=True,
        mark_ids=mark_ids,
        opens_content=found.opens_content,
    )
    text = grammar.forced() if forced else grammar.optional()
    size = backend.get_vocab_size()
    tree: LLTokenizer = make_ll_tokenizer(backend.to_str(), num_ids=size, eos_token_ids=[END])
    compiled = compile_grammar(StructuredOutput("grammar", text))
    first = LLMatcher(tree, compiled, limits=parser_limits())
    assert not first.is_error(), first.get_error()
    for _ in range(NUM_WALKS):
        walked = walk(first, backend, rng)
        if walked is not None:
            yield parsed(walked, TemplateParser(found.template, ParserOptions(), ""))


def check_calls(answer: ParsedAnswer) -> None:
    for call in answer.calls:
        arguments = json.loads(call.arguments)
        if call.head.name == "now":
            assert arguments == {}
        else:
            assert call.head.name == "add"
            assert type(arguments["x"]) is int
            assert arguments.keys() <= {"x", "y"}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", ["qwen", "llama", "mistral", "mistral 11", "gpt-oss", "unknown"])
def test_forced_calls_are_valid(name: str, special: bool) -> None:
    found = plain_format(None) if name == "unknown" else family_format(SAMPLES[name].chat_template)
    assert found is not None
    made = list(answers(found, special=special, forced=True))
    assert made
    for answer in made:
        assert answer.calls and not answer.content
        check_calls(answer)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", ["qwen", "mistral", "mistral 11", "gpt-oss"])
def test_optional_calls_are_valid(name: str, special: bool) -> None:
    found = family_format(SAMPLES[name].chat_template)
    assert found is not None
    made = list(answers(found, special=special, forced=False))
    assert any(answer.calls for answer in made)
    for answer in made:
        check_calls(answer)
