"""The controller's process: ``python -m corun.runtime.cluster.controller``."""

from ..process import run_process
from ..settings import ControllerSettings
from .run import run_controller

if __name__ == "__main__":
    run_process(ControllerSettings, run_controller)
