"""guidellm: concurrent streams with usage in each chunk, under an adapter's name."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from corun.runtime.demo import demo_model_path

from clients.environments import Install
from clients.recorder import Recorder

NUM_REQUESTS, OUTPUT_TOKENS = 6, 16


@pytest.mark.clients
def test_guidellm(recorder: Recorder, install: Install, tmp_path: Path) -> None:
    commands = install("guidellm", "guidellm==0.8.1", "torch==2.13.0")
    report = tmp_path / "report.json"
    for request_format in ("/v1/chat/completions", "/v1/completions"):
        subprocess.run(
            [
                str(commands / "guidellm"),
                *("run", "--disable-progress"),
                *(
                    "--backend",
                    f"kind=openai_http,target={recorder.url},model=upper,request_format={request_format}",
                ),
                *("--profile", "kind=concurrent,streams=2"),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={demo_model_path()}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"),
                *("--output", f"kind=json,path={report}"),
            ],
            check=True,
            timeout=300,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
        tokens = [one["output_tokens"] for one in benchmark["requests"]["successful"]]
        assert tokens == [OUTPUT_TOKENS] * NUM_REQUESTS
        report.unlink()
