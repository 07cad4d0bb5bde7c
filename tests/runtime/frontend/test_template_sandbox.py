"""Templates that take too long or make too much text fail; all others work."""

import time
from typing import Any

import pytest
from corun.runtime.errors import RequestError
from corun.runtime.frontend.chat_template import RENDER_ERRORS, ChatTemplate, Sandbox
from corun.runtime.frontend.template_limits import TemplateTimeoutError, TemplateTooLongError, template_limits
from corun.runtime.limits import TemplateLimits
from jinja2.exceptions import SecurityError, TemplateError

SHORT = TemplateLimits(timeout_s=20.0, max_chars=1000)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def render(source: str, limits: TemplateLimits = SHORT, **variables: Any) -> str:
    with template_limits(limits):
        return ChatTemplate(source, {}).render([], add_generation_prompt=False, **variables)


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
        "{% for i in range(99999) if i < 0 or range(99999) | list | length < 0 %}{% endfor %}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}{{ m() if i < 0 }}{% endfor %}{% endmacro %}"
        "{% for i in range(99999) %}{{ m() }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long(source: str) -> None:
    began_s = time.thread_time()  # others on this machine do not count
    with pytest.raises((TemplateTimeoutError, *RENDER_ERRORS)) as caught:
        render(source, TemplateLimits(timeout_s=0.05))
    assert time.thread_time() - began_s < 1.5
    if isinstance(caught.value, RequestError):
        assert "more than 0.05 s (--template-timeout-s)" in str(caught.value)
        assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1001) %}x{% endfor %}",
        "{{ 'x' * 1001 }}",
        "{{ 1001 * 'x' }}",
        "{{ [0] * 1001 }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ (10 ** 600) * (10 ** 700) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(30) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(30) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(30) %}{% set y %}{{ ns.x }}{{ ns.x }}"
        "{% endset %}{% set ns.x = y %}{% endfor %}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.center(width) }}",
        "{{ '\t'.expandtabs(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x\ny' | indent(1000000000) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '{x:{y}}'.format_map({'x': 1, 'y': 1000000000}) }}",
        "{{ ('x' * 900).replace('x', 'y' * 900) }}",
        "{{ ('x' * 900) | replace('x', 'y' * 900) }}",
        "{{ ('y' * 900).join(['a'] * 900) }}",
        "{{ (['a'] * 100) | join('y' * 900) }}",
        # Lists count with what is nested in them.
        "{{ [[0] * 100] * 100 }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
        "{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(40) %}{% set ns.x = (ns.x, ns.x) %}"
        "{% endfor %}{{ ns.x == ns.x }}",
        "{% set ns = namespace(x=1) %}{% for i in range(40) %}"
        "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        "{{ given }}",
        "{{ given ~ '' }}",
        "{{ given | string }}",
        "{{ given | tojson }}",
        "{{ [given] | join }}",
        "{{ '%s' | format(given) }}",
        "{{ '{}'.format(given) }}",
        "{{ given | replace('a', 'b') }}",
        "{{ [[0] * 10] * 10 | sum(start=[]) }}",
        # Texts in lists, which become one text.
        "{{ ['x' * 900] * 2 }}",
        "{{ (['x' * 900] * 2) ~ '' }}",
        "{{ ['x' * 900, 'x' * 900] | string }}",
        "{{ ['x' * 900, 'x' * 900] | upper }}",
        "{{ dict(a='x' * 900, b='x' * 900).items() }}",
        "{{ ([{'a': 'x' * 900}] * 2) | join(attribute='a') }}",
        "{{ ['x' * 900, 'x' * 900] | tojson }}",
        # Fields of formats that are used often.
        "{% set x = 'x' * 900 %}{{ '%s%s' | format(x, x) }}",
        "{% set x = 'x' * 900 %}{{ '%s%s' % (x, x) }}",
        "{{ '%(a)s%(a)s' % {'a': 'x' * 900} }}",
        "{{ '{0}{0}'.format('x' * 900) }}",
        "{{ '{a}{a}'.format_map({'a': 'x' * 900}) }}",
        # Escapes.
        "{{ ('\\\\' * 900) | tojson }}",
        "{{ ('&' * 900) | forceescape }}",
        "{{ {'a': '&' * 900} | xmlattr }}",
        # Arguments that are written often.
        "{{ 'a a a' | wordwrap(1, wrapstring='x' * 900) }}",
        "{{ [1, 2, 3] | tojson(indent='x' * 900) }}",
        "{{ [[[[1, 2, 3]]]] | tojson(indent=100) }}",
        "{{ [1, 2, 3] | tojson(separators=('x' * 900, ':')) }}",
        "{{ ('\t' * 900).expandtabs() }}",
        "{{ ('x ' * 400).split() | length }}",
        # Comparisons of lists, and of what is nested in them.
        *(
            "{% set ns = namespace(x=1, y=1) %}{% for i in range(40) %}"
            "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% set ns.y = dict(a=ns.y, b=ns.y) %}"
            "{% endfor %}" + use
            for use in (
                "{{ ns.x == ns.y }}",
                "{{ ns.x in [1, ns.y] }}",
                "{{ ns.x is eq(ns.y) }}",
                "{{ [1, 2, ns.x][2:] | unique | list }}",
                "{{ ([1, ns.x][1:]).count(ns.y) }}",
            )
        ),
        # Filters that take long for each character.
        "{{ ('a ' * 100) | wordwrap(1) }}",
        "{{ ('a ' * 100) | urlize }}",
        "{{ ('a ' * 100) | title }}",
        "{{ ('a ' * 100) | list | length }}",
        "{{ ([1] * 100) | sort | length }}",
        "{{ ([1] * 100) | map('string') | list | length }}",
    ],
)
def test_a_template_that_makes_too_much(source: str) -> None:
    given = [[0] * 100] * 100
    with pytest.raises(TemplateTooLongError, match="the chat template") as caught:
        render(source, TemplateLimits(timeout_s=20.0, max_chars=1000), width=10**9, given=given)
    assert caught.value.status == 400


def test_nothing_is_made_while_a_template_is_compiled() -> None:
    environment = Sandbox()
    short = environment.compile(environment.parse("{{ 'x' | center(9) }}"), raw=True)
    long = environment.compile(environment.parse("{{ 'x' | center(99999) }}"), raw=True)
    assert len(str(long)) < len(str(short)) + 100


@pytest.mark.parametrize(
    "source", ["{{ 'x'.encode() }}", "{{ (1).to_bytes(10 ** 9, 'big') }}", "{{ 'a'.translate({97: 'b'}) }}"]
)
def test_methods_that_make_bytes_or_texts_of_any_length_are_refused(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source)


def test_a_time_with_a_long_format_is_refused() -> None:
    with pytest.raises(TemplateError, match="more than 256 characters"):
        render("{{ strftime_now('%c' * 200) }}")


def test_what_is_made_on_the_way_counts_together() -> None:
    source = "{% for i in range(99999) %}{% set x = 'x' * 900 %}{% endfor %}"
    with pytest.raises(TemplateTooLongError, match=r"1000 characters \(--max-template-chars\)"):
        render(source, TemplateLimits(timeout_s=20.0, max_chars=1000))


def test_endless_recursion_is_an_error_of_the_template() -> None:
    with pytest.raises(RENDER_ERRORS):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TemplateLimits(timeout_s=20.0))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(1000) %}x{% endfor %}", "x" * 1000),
        ("{{ 'x' * 1000 }}", "x" * 1000),
        ("{{ [1, 2] + [3] }} {{ 2 ** 10 }} {{ 3 * 4.5 }} {{ 7 % 4 }}", "[1, 2, 3] 1024 13.5 3"),
        ("{{ 'a' ~ 1 ~ none }} {{ 'b' + 'c' }}", "a1None bc"),
        ("{{ 'x'.ljust(3) }}|{{ 'a-b'.replace('-', '+') }}|{{ ', '.join('ab') }}", "x  |a+b|a, b"),
        ("{{ '%05.1f' % 2.5 }} {{ '%s' | format('y') }} {{ '{:>4}'.format(7) }}", "002.5 y    7"),
        ("{{ [1, 2] | join('-') }} {{ 'a' | center(3) }}.", "1-2  a ."),
        ("{{ [{'n': 1}, {'n': 2}] | join(', ', attribute='n') }}", "1, 2"),
        ("{% for i in range(5) if i is odd %}{{ i }}{{ loop.index }}{% else %}-{% endfor %}", "1132"),
        ("{{ 1700000000 | default(1) }} {{ x | default(1700000000) }}", "1700000000 1700000000"),
    ],
)
def test_a_template_within_its_limits(source: str, expected: str) -> None:
    assert render(source) == expected


def test_filters_check_the_time() -> None:
    source = "{% set x = 'x' * 900 %}" + "{{ x | upper | lower | length }}" * 200
    with pytest.raises(TemplateTimeoutError):
        render(source, TemplateLimits(timeout_s=1e-9))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a b c' | wordwrap(1) }} {{ 'ab' | title }}", "a\nb\nc Ab"),
        ("{{ [3, 1, 2] | sort | join }} {{ [1, 2] | sum }}", "123 3"),
        ("{{ [n, [n]] }} {{ (n, 2) }} {{ {'a': [n]} | tojson }}", '[1, [1]] (1, 2) {"a": [1]}'),
        ("{% for a, b in [(n, 2), (3, 4)] %}{{ a + b }}{% endfor %}", "37"),
        ("{{ n in [1, 2] }} {{ [[1] * 2] * 2 }}", "True [[1, 1], [1, 1]]"),
        (
            "{{ [n] == [1] }} {{ [n, 2].count(n) }} {{ n is eq(1) }} {{ namespace(a=n) }}",
            "True 1 True <Namespace>",
        ),
        ("{{ [n] | tojson(indent=2) }} {{ '%s-%(x)s' % {'x': n} if false else '%s' % n }}", "[\n  1\n] 1"),
        ("{{ dict(a=[n]) }} {{ [{'k': n}] | map(attribute='k') | list }}", "{'a': [1]} [1]"),
    ],
)
def test_short_inputs_of_filters_and_lists(source: str, expected: str) -> None:
    assert render(source, n=1) == expected
