"""How engines are spread over machines."""

import pytest
from corun.runtime.cluster.resources import AgentResources, Node, spread
from corun.runtime.errors import ConfigError

HEAD, SMALL, LARGE = Node(0.0, 0.0), Node(4.0, 0.0), Node(8.0, 0.0)
GPUS, GPU = Node(16.0, 4.0), Node(8.0, 1.0)


def test_engines_go_evenly_over_machines_and_none_to_the_head() -> None:
    assert spread([HEAD, SMALL, LARGE], [], 3, on_gpus=True) == [
        AgentResources(2, 8.0, 0.0),
        AgentResources(1, 4.0, 0.0),
    ]
    assert spread([SMALL, SMALL, SMALL], [], 2, on_gpus=True) == [AgentResources(1, 4.0, 0.0)] * 2


def test_an_engine_has_a_gpu_and_an_agent_all_cores() -> None:
    assert spread([LARGE, GPU, GPUS], [], 4, on_gpus=True) == [
        AgentResources(3, 16.0, 3.0),
        AgentResources(1, 8.0, 1.0),
    ]
    assert spread([GPU, SMALL], [], 2, on_gpus=False) == [
        AgentResources(1, 8.0, 0.0),
        AgentResources(1, 4.0, 0.0),
    ]
    assert AgentResources(1, 8.0, 1.0).by_ray_name() == {"CPU": 8.0, "GPU": 1.0}
    assert AgentResources(1, 8.0, 0.0).by_ray_name() == {"CPU": 8.0}


def test_machines_with_an_agent_are_left_out() -> None:
    # One is on a machine that has gone.
    taken = [AgentResources(1, 4.0, 0.0), AgentResources(1, 99.0, 0.0)]
    assert spread([LARGE, SMALL], taken, 1, on_gpus=True) == [AgentResources(1, 8.0, 0.0)]


@pytest.mark.parametrize(
    ("nodes", "number", "words"),
    [
        ([HEAD], 1, "--engines 1 need machines without an agent, and those of Ray have none"),
        ([GPU, GPUS], 6, "--engines 6 need .* have 5 GPUs; give fewer engines"),
    ],
)
def test_too_little_is_refused(nodes: list[Node], number: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spread(nodes, [], number, on_gpus=True)
