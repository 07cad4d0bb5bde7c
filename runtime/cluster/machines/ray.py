"""All uses of Ray: its machines, and actors that supervise agents there.

Only public names of Ray Core are used, and not the object store: an actor gets its settings as an
argument and returns its agent's location. Tokens and adapters go by HTTP. Imported by the process
that keeps agents (``nodes.py``) and by Ray's processes on each machine.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util import list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...errors import CorunError
from ..resources import AgentResources, Node
from ..settings import NodeSettings
from .supervised import FAILED, AgentSupervisor, SupervisedAgent

_NAMESPACE = "corun"
_MAX_CHARS_SHOWN = 300


class RayMachines:
    """A connection to Ray, for one thread. Calls block while Ray is away.

    Raises ``CorunError`` if Ray fails.
    """

    def __init__(self, address: str, cluster_name: str) -> None:
        """Connect through the raylet of this machine."""
        self._name = cluster_name
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning
        try:
            ray.init(address=address, namespace=_NAMESPACE, logging_level="ERROR", log_to_driver=False)
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise CorunError(f"cannot connect to Ray at {address}: {_line(error)}") from None

    def nodes(self) -> list[Node]:
        found = []
        for node in _answer(ray.nodes):
            if node["Alive"]:
                has = node["Resources"]
                found.append(Node(has.get("CPU", 0.0), has.get("GPU", 0.0)))
        return found

    def names(self) -> set[str]:
        start = f"{self._name}/"
        names = _answer(list_named_actors)
        return {name.removeprefix(start) for name in names if name.startswith(start)}

    def begin(self, name: str, resources: AgentResources, settings: NodeSettings) -> None:
        """Have Ray start an actor once a machine has the resources."""
        full = f"{self._name}/{name}"
        try:
            group = _answer(get_placement_group, full)  # from an interrupted try
        except ValueError:
            group = _answer(placement_group, [resources.by_ray_name()], name=full, lifetime="detached")
        settings = msgspec.structs.replace(settings, resources=resources)
        options = {
            "name": full,
            "lifetime": "detached",
            "max_restarts": -1,
            "get_if_exists": True,
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        actor = ray.remote(_SupervisingActor).options(**options)
        _answer(actor.remote, msgspec.json.encode(settings))

    def agents(self, names: Iterable[str], timeout_s: float) -> dict[str, SupervisedAgent]:
        """Return the agents of actors that answer in time; an actor without a machine does not."""
        asked = {}
        for name in names:
            with contextlib.suppress(ValueError):  # the actor has just ended
                actor = _answer(ray.get_actor, f"{self._name}/{name}")
                asked[name] = _answer(actor.agent.remote)
        deadline_s = time.monotonic() + timeout_s
        found = {}
        for name, answer in asked.items():
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                found[name] = msgspec.json.decode(ray.get(answer, timeout=left_s), type=SupervisedAgent)
            except GetTimeoutError:
                continue
            except RayActorError as error:
                if error.actor_init_failed:
                    found[name] = SupervisedAgent(state=FAILED, agent_id=name, reason=_line(error))
            except RayError as error:
                raise CorunError(f"Ray does not answer: {_line(error)}") from None
        return found

    def end(self, name: str) -> None:
        full = f"{self._name}/{name}"
        with contextlib.suppress(ValueError):
            _answer(ray.kill, _answer(ray.get_actor, full))
        with contextlib.suppress(ValueError):
            _answer(remove_placement_group, _answer(get_placement_group, full))


class _SupervisingActor:
    """The actor: supervises an agent on the machine where Ray starts it."""

    def __init__(self, settings: bytes) -> None:
        found = msgspec.json.decode(settings, type=NodeSettings)
        host = ray.util.get_node_ip_address()
        self._supervisor = AgentSupervisor(msgspec.structs.replace(found, host=host))

    def agent(self) -> bytes:
        """Return the agent's state, as JSON."""
        return msgspec.json.encode(self._supervisor.agent())


def _answer(question: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call Ray. Raises ``ValueError`` for an unknown name, and ``CorunError`` for failures."""
    try:
        return question(*arguments, **options)
    except (RayError, RuntimeError, OSError) as error:
        raise CorunError(f"Ray does not answer: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_CHARS_SHOWN] or type(error).__name__
