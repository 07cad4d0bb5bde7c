"""The LiteLLM proxy: a conversation that is too long for one server goes to another."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.serving import Served

from clients.environments import Install
from clients.recorder import Recorder

KEY = "sk-test"
START_TIMEOUT_S = 120.0


def config(small: str, large: str) -> dict[str, Any]:
    """Two servers behind one name each, in both ways that LiteLLM speaks to such servers."""
    models = [
        {
            "model_name": f"{size}-{provider}",
            "litellm_params": {"model": f"{provider}/upper", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for size, url in (("small", small), ("large", large))
        for provider in ("hosted_vllm", "openai")
    ]
    return {
        "model_list": models,
        "litellm_settings": {"num_retries": 0},
        "router_settings": {
            "context_window_fallbacks": [
                {f"small-{provider}": [f"large-{provider}"]} for provider in ("hosted_vllm", "openai")
            ]
        },
        "general_settings": {"master_key": KEY},
    }


def wait_until_live(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline_s, "the proxy does not start"
        try:
            httpx.get(f"{url}/health/liveliness", timeout=5).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return


@pytest.mark.clients
def test_litellm(recorder: Recorder, install: Install, tmp_path: Path) -> None:
    commands = install("litellm", "litellm[proxy]==1.106.2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with Served("--dtype", "float32", "--max-model-len", "64") as small:
        path = tmp_path / "litellm.yaml"
        path.write_text(json.dumps(config(small.url, recorder.url)))  # JSON is YAML
        process = subprocess.Popen(
            [str(commands / "litellm"), "--config", str(path), "--port", str(port), "--telemetry", "False"],
            env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        try:
            wait_until_live(process, url)
            ask_both_sizes(url, small)
        finally:
            process.terminate()
            process.wait(30)


def num_answered(server: Served) -> float:
    """Of the requests that have ended, those that were not refused."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("corun:request_success_total{") and '="refused"' not in line
    )


def ask_both_sizes(url: str, small: Served) -> None:
    """A short conversation stays, a long one goes on to the larger server."""
    for provider in ("hosted_vllm", "openai"):
        for text, num_small in (("planet", 1), ("a long story " * 12, 0)):
            before = num_answered(small)
            for stream in (False, True):
                answer = httpx.post(
                    f"{url}/v1/chat/completions",
                    timeout=60,
                    headers={"Authorization": f"Bearer {KEY}"},
                    json={
                        "model": f"small-{provider}",
                        "max_tokens": 8,
                        "temperature": 0,
                        "stream": stream,
                        "messages": [{"role": "user", "content": text}],
                    },
                )
                assert answer.status_code == 200, answer.text
                assert '"finish_reason"' in answer.text
            assert num_answered(small) - before == 2 * num_small
