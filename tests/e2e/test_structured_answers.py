"""Structure, tools, reasoning and responses over HTTP, with a model whose answers are known."""

from collections.abc import Callable, Iterator

import openai
import pytest
from clients.openai_tools_script import CHECKS
from support.scripted_model import save_scripted_model
from support.serving import Served


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = tmp_path_factory.mktemp("models") / "scripted"
    save_scripted_model(model)
    with (
        Served(str(model), "--dtype", "float32") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("check", CHECKS)
def test_openai(client: openai.OpenAI, check: Callable[[openai.OpenAI, str], None]) -> None:
    check(client, "scripted")
