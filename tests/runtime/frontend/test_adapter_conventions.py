"""An adapter's chat template and tokenizer, as the front end uses them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from corun.runtime.adapters.conventions import NO_CONVENTIONS, AdapterConventions
from corun.runtime.adapters.info import AdapterInfo
from corun.runtime.adapters.vocabulary import AddedToken, TokenDifferences
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.messages import OperationDone, ReadAdapter
from corun.runtime.errors import AdapterError, AdapterFailedError, OverloadedError, RequestError
from corun.runtime.frontend.adapter_conventions import AdapterTokenizers, Conventions
from corun.runtime.frontend.lora_client import LoraClient
from corun.runtime.frontend.tokenizer import Tokenizer
from support.fake_core import model_info

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = "{{ bos_token }}{{ eos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def text_of(conventions: Conventions) -> str:
    return conventions.apply_chat_template(HELLO, add_generation_prompt=False)


def made(tokenizer: Tokenizer, own: AdapterConventions) -> Conventions:
    """Make conventions as the front end does from the engine's data."""
    found: list[Conventions] = []

    async def scene(world: World) -> None:
        world.tell(own)
        found.append(await world.tokenizers.conventions_of("a"))

    run(tokenizer, scene)
    return found[0]


def test_the_adapters_template_writes_its_conversations(tokenizer: Tokenizer) -> None:
    assert text_of(Conventions(tokenizer)) == "<user>hello"
    assert text_of(made(tokenizer, NO_CONVENTIONS)) == "<user>hello"
    found = made(tokenizer, AdapterConventions(TEMPLATE, digest="d"))
    assert text_of(found) == "<s></s>[hello]"
    assert (found.digest, found.waited_s) == ("d", 0.0)


def test_a_template_names_the_special_tokens_of_the_adapter(tokenizer: Tokenizer) -> None:
    own = AdapterConventions(TEMPLATE, {"bos_token": None, "eos_token": "<end>"})
    assert text_of(made(tokenizer, own)) == "<end>[hello]"


def test_a_template_that_refuses_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    own = AdapterConventions("{{ raise_exception('no system message') }}")
    with pytest.raises(RequestError, match=r"adapter's chat template refuses.*no system message"):
        text_of(made(tokenizer, own))


def test_conventions_that_cannot_be_used_refuse_conversations(tokenizer: Tokenizer) -> None:
    own = AdapterConventions(refusal="tokenizer.json is not a file")
    with pytest.raises(RequestError, match=r"'a' takes no messages: tokenizer\.json is not a file"):
        text_of(made(tokenizer, own))


def test_without_any_template_the_folder_is_named(template_less: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"neither adapter 'a' nor .* chat_template\.jinja"):
        text_of(Conventions(template_less, "a"))
    with pytest.raises(RequestError, match="the model has no chat template"):
        text_of(Conventions(template_less))


def test_templates_of_the_adapter_come_before_those_of_the_base(tokenizer: Tokenizer) -> None:
    base = (tokenizer.codec.template.response_template, tokenizer.codec.template.text)
    assert Conventions(tokenizer).templates() == [(None, None), base]
    own = AdapterConventions(TEMPLATE, response_template="{}", digest="d")
    assert made(tokenizer, own).templates() == [("{}", TEMPLATE), base]


class Client:
    """An engine client that records what is sent."""

    config = EngineConfig()

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class World:
    """A front end with one adapter that has not been read yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.client = Client()
        self.loras = LoraClient(self.client)  # type: ignore[arg-type]
        self.tell(None)
        self.tokenizers = AdapterTokenizers(tokenizer, self.loras, model_info("x"))

    def tell(self, conventions: AdapterConventions | None, state: str = "ready") -> None:
        info = AdapterInfo("a", "/a", state, "damaged", 8, 9, "", conventions=conventions)
        self.loras.directory.update((info,))

    async def done(self, error: str | None = None) -> None:
        while not self.client.sent:
            await asyncio.sleep(0)
        (message,) = self.client.sent
        assert isinstance(message, ReadAdapter) and message.name == "a"
        kind = None if error is None else AdapterError.__name__
        self.loras.operation_done(OperationDone(message.operation_id, error, kind))


def run(tokenizer: Tokenizer, scene: Callable[[World], Any]) -> None:
    async def play() -> None:
        world = World(tokenizer)
        await scene(world)

    asyncio.run(play())


def test_files_are_read_once_for_all_who_need_them(tokenizer: Tokenizer) -> None:
    async def scene(world: World) -> None:
        asked = [asyncio.ensure_future(world.tokenizers.conventions_of("a")) for _ in range(3)]
        await asyncio.sleep(0)
        world.tell(AdapterConventions(TEMPLATE, digest="d"))
        await world.done()
        found = await asyncio.gather(*asked)
        assert [text_of(one) for one in found] == ["<s></s>[hello]"] * 3
        assert {one.digest for one in found} == {"d"}
        again = await world.tokenizers.conventions_of("a")
        assert again.digest == "d" and len(world.client.sent) == 1
        assert found[0].waited_s > again.waited_s == 0.0

    run(tokenizer, scene)


def test_files_that_cannot_be_read_fail_as_the_adapter_does(tokenizer: Tokenizer) -> None:
    async def scene(world: World) -> None:
        asked = asyncio.ensure_future(world.tokenizers.conventions_of("a"))
        await asyncio.sleep(0)
        world.tell(None, "failed")
        await world.done("damaged")
        with pytest.raises(AdapterFailedError, match="damaged"):
            await asked

    run(tokenizer, scene)


def test_no_request_waits_longer_than_for_its_turn(tokenizer: Tokenizer) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(OverloadedError, match="--max-queue-s"):
            await world.loras.read_conventions_of("a", 0.0)
        world.tell(NO_CONVENTIONS)
        await world.done()  # the reading goes on

    run(tokenizer, scene)


def test_adapters_that_add_the_same_tokens_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    async def scene(world: World) -> None:
        tokens = TokenDifferences((AddedToken("<new>", 258),))
        world.tell(AdapterConventions(tokens=tokens))
        one, two = await asyncio.gather(*(world.tokenizers.conventions_of("a") for _ in range(2)))
        assert one.tokenizer is two.tokenizer is not tokenizer
        assert one.tokenizer.queue is tokenizer.queue
        assert one.tokenizer.encode("<new>", add_special_tokens=False) == [258]
        world.tell(AdapterConventions("x", digest="x"))
        other = await world.tokenizers.conventions_of("a")
        assert other.tokenizer is tokenizer

    run(tokenizer, scene)
