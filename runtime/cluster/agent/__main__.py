"""The agent's process: ``python -m corun.runtime.cluster.agent``."""

from ..process import run_process
from ..settings import AgentSettings
from .run import run_agent

if __name__ == "__main__":
    run_process(AgentSettings, run_agent)
