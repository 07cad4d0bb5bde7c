"""Random schemas: each answer that ends by itself validates, or the schema was refused by name."""

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
from corun.runtime.errors import RequestError
from corun.runtime.grammar.compile import check_structure, compile_grammar, parser_limits
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

TREE = trial_tokenizer(257, {})
KEYWORDS = """
    oneOf multipleOf exclusiveMinimum exclusiveMaximum minProperties maxProperties minimum maximum
    pattern format minLength maxLength minItems maxItems allOf anyOf enum not required
    Unsatisfiable uniqueItems
""".split()
MAX_ANSWER_TOKENS = 300
NAMES = st.sampled_from(["a", "b", "name", "größe", 'quo"te', "x y"])
SMALL = st.integers(-20, 20)
PATTERNS = ["^[a-z]+$", "[0-9]{2,3}", "^(x|yz)*$", r"^\d{4}-\d{2}$", "é+"]
FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "duration"]


def options(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def ordered(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(values, values).map(sorted)
    return pairs.map(lambda pair: {low: pair[0], high: pair[1]})


SIZES = st.integers(0, 4)
LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.just({"type": "string"}),
    st.just({"type": ["string", "null"]}),
    ordered("minLength", "maxLength", SIZES).map(lambda one: {"type": "string"} | one),
    st.sampled_from(PATTERNS).map(lambda one: {"type": "string", "pattern": one}),
    st.sampled_from(FORMATS).map(lambda one: {"type": "string", "format": one}),
    ordered("minimum", "maximum", SMALL).map(lambda one: {"type": "integer"} | one),
    options(minimum=SMALL, multipleOf=st.integers(1, 9)).map(lambda one: {"type": "integer"} | one),
    st.tuples(
        st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
    )
    .flatmap(lambda names: ordered(*names, st.floats(-9, 9).map(lambda number: round(number, 2))))
    .map(lambda one: {"type": "number"} | one),
    st.lists(SMALL | st.text(max_size=4) | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.recursive(SMALL | st.text(max_size=3), lambda x: st.lists(x, max_size=2), max_leaves=3).map(
        lambda value: {"const": value}
    ),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.one_of(
        inner.map(lambda one: {"type": "array", "items": one}),
        st.tuples(inner, ordered("minItems", "maxItems", SIZES)).map(
            lambda pair: {"type": "array", "items": pair[0]} | pair[1]
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
    )
    objects = st.builds(
        lambda properties, number, more: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:number],
            "additionalProperties": more,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.integers(0, 4),
        st.just(False) | inner,
    )
    pairs = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        arrays,
        objects,
        objects,
        pairs.map(lambda some: {"anyOf": some}),
        pairs.map(lambda some: {"oneOf": some}),
        inner.map(lambda one: {"allOf": [one, {"title": "the same"}]}),
    )


SCHEMAS = st.recursive(LEAVES, containers, max_leaves=8)


def answer(grammar: str, rng: random.Random) -> str | None:
    """Return a random answer that ends by itself; None if it grows too long."""
    matcher = LLMatcher(TREE, grammar, log_level=0, limits=parser_limits())
    tokens: list[int] = []
    for _ in range(MAX_ANSWER_TOKENS):
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")).tolist()
        assert allowed and not matcher.is_error(), matcher.get_error()
        if TREE.eos_token in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return TREE.decode_bytes(tokens).decode()
        # Structure first: random letters of strings seldom end.
        short = [one for one in allowed if chr(one) in '"}],:' and one < 256]
        drawn = rng.choice(short if short and rng.random() < 0.7 else allowed)
        if drawn == TREE.eos_token:
            continue
        assert matcher.consume_token(drawn)
        tokens.append(drawn)
    return None


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 2**32))
def test_answers_validate_or_the_keyword_is_named(schema: Any, seed: int) -> None:
    structured = StructuredOutput("json_schema", json.dumps(schema))
    try:
        check_structure(structured, TREE)
    except RequestError as error:
        assert any(keyword in str(error) for keyword in KEYWORDS), error
        return
    grammar, rng = compile_grammar(structured), random.Random(seed)
    for _ in range(3):
        text = answer(grammar, rng)
        if text is not None:
            jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
