"""A gateway's process: ``python -m corun.runtime.cluster.gateway``."""

from ...machine.gc_control import keep_imported
from ..process import run_process
from ..settings import GatewaySettings
from .run import run_gateway

if __name__ == "__main__":
    import uvloop

    keep_imported()
    run_process(GatewaySettings, run_gateway, make_loop=uvloop.new_event_loop)
