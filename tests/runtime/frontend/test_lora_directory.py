"""The front end's copy of the registry answers as the engine's registry does."""

from itertools import count

import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.registry import AdapterRegistry
from corun.runtime.engine_state import Residency
from corun.runtime.errors import AdapterUnavailableError, RequestError, UnknownModelError
from corun.runtime.frontend.inputs import LoraDirectory
from corun.runtime.plan import AdapterId
from corun.runtime.server.state import ModelNames


def make_registry() -> AdapterRegistry:
    """One adapter in each state."""
    ids = count(1)
    registry = AdapterRegistry(lambda: AdapterId(next(ids)))
    for name in ("ready", "draining"):
        load_id = registry.begin_loading(name, f"/{name}")
        content = AdapterContent(AdapterFacts(name, 8, 100))
        registered = registry.ready(name, f"/{name}", load_id, content)
        assert registered is not None
        registry.acquire(registered.version.adapter_id)
    registry.remove("draining")
    registry.begin_loading("loading", "/loading")
    registry.failed("failed", registry.begin_loading("failed", "/failed"), "no such file")
    return registry


@pytest.mark.parametrize(
    ("name", "kind"), [("draining", AdapterUnavailableError), ("failed", AdapterUnavailableError)]
)
def test_what_cannot_be_used_is_refused_in_the_same_words(name: str, kind: type[RequestError]) -> None:
    registry = make_registry()
    mirror = LoraDirectory(registry.infos(lambda _: Residency()))
    answers = set()
    for resolve in (
        registry.resolve,
        mirror.check_usable,
        lambda asked: ModelNames(["base"]).resolve(f"base:{asked}", mirror),
    ):
        with pytest.raises(kind) as caught:
            resolve(name)
        answers.add(str(caught.value))
    assert len(answers) == 1


def test_an_unknown_name_is_answered_with_near_ones_or_with_what_is_served() -> None:
    registry = make_registry()
    registry.remove("failed")
    mirror = LoraDirectory(registry.infos(lambda _: Residency()))
    for check in (registry.resolve, registry.remove, mirror.check_known, mirror.check_usable):
        with pytest.raises(UnknownModelError, match="named 'ready2'; did you mean 'ready'"):
            check("ready2")
        with pytest.raises(UnknownModelError, match=r"named 'zzz'; served are .*'ready'"):
            check("zzz")


def test_one_that_is_loading_is_left_to_the_engine() -> None:
    mirror = LoraDirectory(make_registry().infos(lambda _: Residency()))
    mirror.check_usable("loading")
    mirror.check_usable("ready")
    assert ModelNames(["base"]).resolve("base:loading", mirror).adapter == "loading"
