"""GBNF allows the same texts in Lark: grammars in the style of llama.cpp's own."""

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.grammar.compile import check_structure, compile_grammar, parser_limits
from corun.runtime.grammar.tokenizer import trial_tokenizer
from corun.runtime.sampling import StructuredOutput
from llguidance import LLMatcher

TREE = trial_tokenizer(257, {})
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CASES = {
    "json": (JSON, ['{"a": [1, -2.5e3, "x\\"y\\u00e9", null]}', "{}"], ['{"a" 1}', "[1]"]),
    "sums": (SUMS, ["a+b=3\n", "(x*2)/4=1\n\n"], ["a+=3\n", "a=3"]),
    "one text begins another": ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab"]),
    "a repeated text": ('root ::= "ab"* "c"{2}', ["cc", "abababcc"], ["abbcc", "c"]),
    "nothing": ('root ::= "" | "a"', ["", "a"], ["b"]),
    "names that differ in a dash": (
        'root ::= a-b a_b\na-b ::= "x"\na_b ::= "y" root | "z"\n',
        ["xz", "xyxz"],
        ["z"],
    ),
    "words of Lark": ('root ::= start ignore\nstart ::= "%json"\nignore ::= "i"', ["%jsoni"], ["i"]),
    "any character": ('root ::= . "x"', ["ax", "\nx", "éx"], ["x"]),
    "code points": (
        r'root ::= "\U0001F600" [\U0001F600-\U0001F64F\u00e9] "\x41\xe9" "\\u0041"',
        ["😀😁Aé\\u0041", "😀éAé\\u0041"],
        ["😀aAé\\u0041"],
    ),
    "brackets and slashes": (r'root ::= "\[" [/\]]+ "/" "\]"', ["[/]/]", "[//]"], ["[/]"]),
    "lines of Windows": ('root ::= "a" |\r\n  "b"\r\n', ["a", "b"], ["c"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_texts_are_allowed(name: str) -> None:
    text, allowed, refused = CASES[name]
    structured = StructuredOutput("grammar", text)
    check_structure(structured, TREE)
    grammar = compile_grammar(structured)

    def allows(answer: str) -> bool:
        matcher = LLMatcher(TREE, grammar, log_level=0, limits=parser_limits())
        tokens = TREE.tokenize_str(answer)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert {answer: allows(answer) for answer in allowed} == dict.fromkeys(allowed, True)
    assert {answer: allows(answer) for answer in refused} == dict.fromkeys(refused, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start ::= "a"', "there is no rule root"),
        ("root ::= other", "there is no rule other"),
        ('root ::= "a', "Unexpected end of input"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "recursion depth"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"neither Lark with start: nor GBNF: .*{message}"):
        compile_grammar(StructuredOutput("grammar", text))
