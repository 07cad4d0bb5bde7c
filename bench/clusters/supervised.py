"""Runs the cluster of the plan on standard input: ``python -m clusters.supervised``."""

import asyncio
import logging
import sys

import msgspec
from corun.runtime.cli.cluster import supervise
from corun.runtime.cluster.launch.supervisor import ClusterPlan

if __name__ == "__main__":
    logging.basicConfig(level="WARNING")
    sys.exit(asyncio.run(supervise(msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterPlan))))
