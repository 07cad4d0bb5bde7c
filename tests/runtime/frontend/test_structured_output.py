"""Structure that cannot be served is refused before the engine receives it."""

import asyncio
import dataclasses

import psutil
import pytest
from corun.runtime.config.engine import EngineConfig
from corun.runtime.engine.client import ThreadClient
from corun.runtime.engine.messages import AddRequests, ToEngine
from corun.runtime.errors import RequestError
from corun.runtime.frontend.async_engine import AsyncEngine
from corun.runtime.frontend.inputs import BatchItem
from corun.runtime.sampling import SamplingParams, StructuredOutput
from support.fake_core import FACTORY

FREE = SamplingParams(max_tokens=2)


def with_schema(text: str) -> SamplingParams:
    return dataclasses.replace(FREE, structured_output=StructuredOutput("json_schema", text))


class _CountingClient(ThreadClient):
    """Counts the requests that the engine receives."""

    num_sent = 0

    def send(self, message: ToEngine) -> None:
        if isinstance(message, AddRequests):
            self.num_sent += len(message.requests)
        super().send(message)


def test_the_engine_gets_only_what_can_be_served(tokenizer_dir: str) -> None:
    before = set(psutil.Process().children())  # earlier tests may have left some

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    async def test() -> None:
        client = _CountingClient(EngineConfig(model=tokenizer_dir), factory=FACTORY)
        async with AsyncEngine.from_client(client) as engine:
            async for _ in engine.generate("hi", FREE):
                pass
            assert not started()  # nothing runs that is not needed
            num_sent = client.num_sent
            for refused in (with_schema('{"not": {}}'), with_schema("{")):
                with pytest.raises(RequestError, match="structured_output cannot be") as caught:
                    async for _ in engine.generate("hi", refused):
                        pass
                assert caught.value.param == "structured_output"
                with pytest.raises(RequestError, match="structured_output cannot be"):
                    await engine.generate_batch([BatchItem("hi", refused, None)])
            assert client.num_sent == num_sent
            async for _ in engine.generate("hi", with_schema('{"type": "string"}')):
                pass
            assert client.num_sent == num_sent + 1
            assert len(started()) == 1
        assert not started()

    asyncio.run(test())
