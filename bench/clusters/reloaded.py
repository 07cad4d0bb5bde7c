"""Reloads with content that answers identify: two small real engines, and the demo."""

from pathlib import Path

import aiohttp
from corun.runtime.demo import demo_model_path
from demo.tasks import unseen_examples

from .engine_faults import Figures
from .live import live_cluster
from .state_faults import rolling_reloads
from .streams import OK, one_stream

_NUM_ENGINES = 2
_TASKS = ("upper", "reverse")
_NAME = "changing"


async def reloads_of_demo(directory: Path, repeats: int) -> list[Figures]:
    """The figures of each repeat of 20 reloads."""
    model = demo_model_path()
    contents = [model.parent / "adapters" / task for task in _TASKS]
    arguments = {"device": "cpu", "memory_gib": 0.2, "dtype": "float32"}
    text = unseen_examples(_TASKS[0], 1, 0)[0][0]
    body = {
        "model": _NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 16,
    }
    async with live_cluster(
        directory / "state", _NUM_ENGINES, None, model=str(model), arguments=arguments
    ) as cluster:
        answers = []
        async with aiohttp.ClientSession() as session:
            for task, content in zip(_TASKS, contents, strict=True):
                await cluster.load(task, content)
                outcome = await one_stream(session, cluster.url, body | {"model": task})
                assert outcome.kind == OK, str(outcome)
                answers.append(outcome.text)
        assert len(set(answers)) == len(answers), f"contents answer alike: {answers}"
        return [await rolling_reloads(cluster, contents, answers, body) for _ in range(repeats)]
