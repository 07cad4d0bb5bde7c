"""Structure, tools, reasoning and responses: each client does all that it has for them."""

import os
import subprocess
from pathlib import Path

import pytest

from clients.environments import Install, install_packages
from clients.recorder import Recorder

SCRIPTS = Path(__file__).parent
TIMEOUT_S = 300
# By the name of the script: the environment and what is in it.
CLIENTS = {
    "openai_tools": ("openai", "openai==3.57.0"),
    "instructor": ("instructor", "instructor==1.17.0"),
    "langchain": ("langchain", "langchain-openai==1.7.4"),
    "llama_index": ("llama_index", "llama-index-llms-openai-like==0.8.1"),
    "pydantic_ai": ("pydantic_ai", "pydantic-ai-slim[openai]==2.68.0"),
    "openai_agents": ("openai_agents", "openai-agents==0.24.0"),
    "litellm_tools": ("litellm", "litellm[proxy]==1.106.2"),
    "anthropic": ("anthropic", "anthropic==2.14.0"),
    "inspect": ("inspect", "inspect-ai==0.3.285", "openai==3.57.0"),
}
PACKAGES = ("ai@6.0.325", "@ai-sdk/openai-compatible@2.0.92", "zod@4")
ENVIRONMENT = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS)
def test_client(scripted_recorder: Recorder, install: Install, client: str, tmp_path: Path) -> None:
    commands = install(*CLIENTS[client])
    script = SCRIPTS / f"{client}_script.py"
    subprocess.run(
        [str(commands / "python"), str(script), scripted_recorder.url],
        check=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )


@pytest.mark.clients
@pytest.mark.parametrize("client", ["vercel"])
def test_vercel(scripted_recorder: Recorder, client: str) -> None:
    home = install_packages(client, *PACKAGES)
    script = home / "script.mjs"  # which finds the packages beside it
    script.write_bytes((SCRIPTS / "vercel_script.mjs").read_bytes())
    subprocess.run(["node", str(script), scripted_recorder.url], check=True, timeout=TIMEOUT_S)
