"""An evaluation of inspect-ai with a tool; runs in the package's own environment."""

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

CALLS: list[str] = []


@tool
def get_weather() -> Tool:
    """The weather of a city."""

    async def execute(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: Its name.
        """
        CALLS.append(city)
        return "sunny"

    return execute


def main() -> None:
    """Ask the server at the address given."""
    model = get_model("openai-api/corun/scripted", base_url=f"{sys.argv[1]}/v1", api_key="none")
    samples = [Sample(input="How is the weather in Paris?", target="sunny")]
    task = Task(dataset=samples, solver=[use_tools(get_weather()), generate()], scorer=includes())
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    assert log.status == "success", log.error
    assert log.results is not None and log.results.scores[0].metrics["accuracy"].value == 1.0
    assert CALLS == ["Paris"], CALLS


if __name__ == "__main__":
    main()
