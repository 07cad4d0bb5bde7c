"""The event loop renders what is quick; a thread renders the rest, and has a deadline."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from corun.runtime.frontend import template_limits as limits
from corun.runtime.frontend.chat_template import ChatTemplate
from corun.runtime.frontend.template_limits import (
    TemplateTimeoutError,
    leave_to_thread,
    render_in_time,
    template_limits,
)
from corun.runtime.limits import TemplateLimits
from jinja2.exceptions import TemplateError

LONG = TemplateLimits(timeout_s=20.0)
SHORT = TemplateLimits(timeout_s=0.05)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Rendering:
    """A template's rendering, which notes the threads in which it began."""

    def __init__(self, source: str, *, is_compiled: bool = True, **variables: Any) -> None:
        self.threads: list[threading.Thread] = []
        self._template = ChatTemplate(source, {})
        self._variables = variables
        if is_compiled:
            with template_limits(LONG):
                self.text = self()
            self.threads.clear()

    def __call__(self) -> str:
        self.threads.append(threading.current_thread())
        return self._template.render([], add_generation_prompt=False, **self._variables)

    @property
    def was_on_loop_alone(self) -> bool:
        return self.threads == [threading.main_thread()]


def run(render: Callable[[], str], limits: TemplateLimits = LONG, **options: bool) -> str:
    return asyncio.run(render_in_time(render, limits, **options))


@pytest.fixture
def patient_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, what is quick takes longer than the few milliseconds of the loop."""
    monkeypatch.setattr(limits, "_ON_LOOP_S", LONG.timeout_s)


@pytest.mark.usefixtures("patient_loop")
def test_what_is_quick_is_rendered_on_the_event_loop() -> None:
    rendering = Rendering("{{ 'x' | upper }}")
    assert run(rendering) == "X"
    assert rendering.was_on_loop_alone


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(300) %}{% for j in range(1000) %}{% endfor %}{% endfor %}x",
        "{{ ('a ' * 10000) | wordwrap(1) | length }}",
        "{{ ('x' * 100000) | upper }}",
        "{{ range(9999) | list | sort | length }}",
    ],
)
def test_what_may_take_long_begins_again_in_a_thread(source: str) -> None:
    rendering = Rendering(source)
    assert run(rendering) == rendering.text
    assert len(rendering.threads) == 2
    assert rendering.threads[1] is not threading.main_thread()


@pytest.mark.usefixtures("patient_loop")
def test_a_template_is_compiled_in_a_thread() -> None:
    rendering = Rendering("{# only here #}{{ 1 }}", is_compiled=False)
    assert run(rendering) == "1"
    assert len(rendering.threads) == 2
    rendering.threads.clear()
    assert run(rendering) == "1"
    assert rendering.was_on_loop_alone


def test_large_input_is_never_rendered_on_the_event_loop() -> None:
    rendering = Rendering("x")
    assert run(rendering, is_large=True) == "x"
    assert threading.main_thread() not in rendering.threads


def test_code_that_is_not_limited_is_never_run_on_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def render() -> str:
        leave_to_thread()
        threads.append(threading.current_thread())
        return "x"

    assert run(render) == "x"
    assert threads and threading.main_thread() not in threads
    assert render() == "x", "outside a server there is no event loop"


def test_errors_pass_through() -> None:
    def refuses() -> str:
        raise ValueError("no")

    for is_large in (False, True):
        with pytest.raises(ValueError, match="no"):
            run(refuses, is_large=is_large)
    with pytest.raises(TemplateTimeoutError):
        run(Rendering(LOOP, is_compiled=False), SHORT)


@pytest.mark.parametrize("is_large", [False, True])
def test_only_the_processor_time_of_a_template_counts(*, is_large: bool) -> None:
    def waits() -> str:
        time.sleep(SHORT.timeout_s)
        return "x"

    rendering = Rendering("{{ x() }}{{ x() }}", x=waits)
    assert run(rendering, SHORT, is_large=is_large) == "xx"


@pytest.mark.parametrize("is_large", [False, True])
def test_what_a_failed_rendering_has_read_is_not_kept(*, is_large: bool) -> None:
    class Text:
        pass

    async def scene() -> None:
        text = Text()
        kept = weakref.ref(text)
        rendering = Rendering("{{ raise_exception(x) }}", is_compiled=False, x=text)
        with pytest.raises(TemplateError):
            await render_in_time(rendering, LONG, is_large=is_large)
        del text, rendering
        while kept() is not None:  # the thread may not have returned yet
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scene(), 20))
    finally:
        gc.enable()


def test_a_rendering_that_cannot_be_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a filter in C code."""
    monkeypatch.setattr(limits, "_LATE_S", 0.05)
    gate = threading.Event()
    has_ended: list[bool] = []

    def holds() -> str:
        leave_to_thread()
        gate.wait(60)
        has_ended.append(True)
        return "late"

    async def body() -> None:
        with pytest.raises(TemplateTimeoutError, match=r"more than 0\.05 s"):
            await render_in_time(holds, SHORT)
        assert not has_ended, "it was waited for, or the loop was held"

    try:
        asyncio.run(body())
    finally:
        gate.set()
