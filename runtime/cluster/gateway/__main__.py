"""A gateway's process: ``python -m corun.runtime.cluster.gateway``."""

from ...machine.gc_control import keep_imported
from ...machine.unused_memory import return_large_blocks
from ..process import run_process
from ..settings import GatewaySettings
from .run import run_gateway

if __name__ == "__main__":
    import uvloop

    keep_imported()
    return_large_blocks()
    run_process(GatewaySettings, run_gateway, make_loop=uvloop.new_event_loop)
