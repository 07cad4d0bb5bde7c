"""Seeds and token limits of engine requests, and the front end's copy of the registry."""

import random
from itertools import count
from typing import Any

import msgspec
import pytest
from corun.runtime.adapter import AdapterFacts
from corun.runtime.adapters.content import AdapterContent
from corun.runtime.adapters.registry import AdapterRegistry
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.loop import OwnPolicies
from corun.runtime.engine.messages import AddRequest
from corun.runtime.engine_state import Residency
from corun.runtime.errors import AdapterUnavailableError, ConfigError, RequestError, UnknownModelError
from corun.runtime.frontend.inputs import (
    LoraDirectory,
    PreparedRequest,
    check_token_rules,
    choice_seed,
    default_sampling,
    engine_sampling,
    read_options,
)
from corun.runtime.frontend.tokenizer import Tokenizer
from corun.runtime.memory.policies.corun import CorunMemoryPolicy
from corun.runtime.plan import AdapterId
from corun.runtime.sampling import SamplingParams
from corun.runtime.scheduler.keyed import FcfsPolicy
from corun.runtime.server.state import ModelNames
from hypothesis import given
from hypothesis import strategies as st
from support.fake_core import MAX_MODEL_LEN, model_info


def engine_requests(tokenizer: Tokenizer, *, first_id: int = 0, **sampling: Any) -> list[AddRequest]:
    params = SamplingParams(**sampling)
    samplings = engine_sampling(
        params, num_prompt_tokens=3, max_model_len=MAX_MODEL_LEN, rng=random.Random(0)
    )
    prepared = PreparedRequest(
        request_id="x",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        params=params,
        samplings=samplings,
        lora_request="name",
        tokenizer=tokenizer,
        cache_salt="salt",
        predicted_output_tokens=5,
    )
    return prepared.engine_requests(count(first_id))


@given(st.integers(-(2**63), 2**64 - 1))
def test_choices_differ_and_the_first_keeps_the_seed(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(50)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 50
    assert all(0 <= one < 2**63 for one in seeds[1:])


def test_one_engine_request_per_choice(tokenizer: Tokenizer) -> None:
    requests = engine_requests(tokenizer, first_id=7, n=3, seed=9, stop="x", truncate_prompt_tokens=3)
    assert [request.request_id for request in requests] == [7, 8, 9]
    for request in requests:
        assert (request.sampling.n, request.sampling.stop) == (1, ())
        assert request.sampling.truncate_prompt_tokens is None
        assert (request.adapter_name, request.cache_salt) == ("name", "salt")
        assert request.predicted_output_tokens == 5
        assert request.prompt_token_ids == (1, 2, 3)
    assert [request.sampling.seed for request in requests] == [choice_seed(9, index) for index in range(3)]


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_no_more_tokens_are_listed_than_the_model_has(name: str) -> None:
    fits: dict[str, Any] = {name: [1] * 8}
    check_token_rules(SamplingParams(**fits), vocab_size=8, max_logit_bias=9)
    more: dict[str, Any] = {name: [1] * 9}
    with pytest.raises(RequestError, match=f"{name} has 9 entries, the vocabulary has 8") as caught:
        check_token_rules(SamplingParams(**more), vocab_size=8, max_logit_bias=9)
    assert caught.value.param == name


def test_max_tokens_is_what_the_context_takes_at_most(tokenizer: Tokenizer) -> None:
    cases = ((None, MAX_MODEL_LEN - 3), (10**6, MAX_MODEL_LEN - 3), (5, 5), (0, 1))
    for max_tokens, expected in cases:
        (request,) = engine_requests(tokenizer, max_tokens=max_tokens, prompt_logprobs=0)
        assert request.sampling.max_tokens == expected
        assert request.sampling.seed is not None


def test_the_model_states_the_defaults() -> None:
    model = msgspec.structs.replace(model_info(""), default_sampling={"temperature": 0.5, "top_k": 50.0})
    params = default_sampling(model)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 50, 1.0)
    assert isinstance(params.top_k, int)


def test_options_make_a_configuration_and_a_policy_beside_it() -> None:
    config = EngineConfig(seed=3)
    assert read_options(None, {"seed": 3}) == (config, None)
    assert read_options(config, {}) == (config, None)
    own = OwnPolicies(scheduling=FcfsPolicy)
    assert read_options(None, {"seed": 3, "scheduling_policy": FcfsPolicy}) == (config, own)
    assert read_options(config, {"scheduling_policy": FcfsPolicy}) == (config, own)
    own = OwnPolicies(FcfsPolicy, CorunMemoryPolicy)
    options = {"scheduling_policy": FcfsPolicy, "memory_policy": CorunMemoryPolicy}
    assert read_options(config, options) == (config, own)
    with pytest.raises(TypeError, match="not both: scheduling_policy"):
        read_options(config, {"scheduling_policy": "fcfs"})
    with pytest.raises(ConfigError, match=r"--scheduling-policy is .*object"):
        read_options(None, {"scheduling_policy": object()})


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
