"""The time of fetching an adapter's files from another agent, on one machine."""

import asyncio
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from corun.runtime.adapters.checkpoint import WEIGHTS_NAME
from corun.runtime.cluster.agent.fetch import Fetcher
from corun.runtime.cluster.agent.store import AdapterFileStore
from corun.runtime.cluster.wire import AGENT_FILES_PATH, AdapterEntry
from paired import ratio_of
from support.agents import KEY, agent_of

MAX_BYTES_MS, MAX_CHECKED_MS = 150.0, 400.0
_NUM_BYTES = 100_000_000
_NUM_RUNS = 15
_RANK = 64


async def _release(digest: str) -> bool:
    return True


def fetch_figures() -> tuple[dict[str, Any], dict[str, bool | None]]:
    """Fetch again and again, each time to an empty store; beside it the bytes alone."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        digest = asyncio.run(_ingest(directory))
        peer = subprocess.Popen(
            [sys.executable, "-m", __name__, str(directory / "peer")],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert peer.stdout is not None
            url = peer.stdout.readline().decode().strip()
            bytes_ms = [_bytes_ms(url, digest, directory) for _ in range(_NUM_RUNS + 1)][1:]
            checked_ms = [
                asyncio.run(_fetch_ms(url, digest, directory / f"store-{number}"))
                for number in range(_NUM_RUNS + 1)
            ][1:]
        finally:
            peer.kill()
            peer.wait()
    figures: dict[str, Any] = {}
    bounds: dict[str, bool | None] = {}
    for what, values, limit in (("bytes", bytes_ms, MAX_BYTES_MS), ("checked", checked_ms, MAX_CHECKED_MS)):
        label = f"fetch of 100 MB, {what}, ms"
        figures[label] = ratio_of(values).to_json()
        bounds[f"{label} <= {limit:g}"] = statistics.median(values) <= limit
        print(f"{label}: {figures[label]}", flush=True)
    return figures, bounds


async def _ingest(directory: Path) -> str:
    """Have a peer's store take in an adapter; return its digest."""
    source = _save_adapter(directory / "source")
    store = AdapterFileStore(directory / "peer", 1 << 40)
    try:
        manifest, _ = await store.ingest(source, _release)
    finally:
        store.close()
    return manifest.digest


def _save_adapter(directory: Path) -> Path:
    import msgspec
    import numpy as np
    from safetensors.numpy import save_file

    width = _NUM_BYTES // (4 * 2 * _RANK)
    rng = np.random.default_rng(0)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    directory.mkdir()
    tensors = {
        f"{prefix}.lora_A.weight": rng.standard_normal((_RANK, width), dtype=np.float32),
        f"{prefix}.lora_B.weight": rng.standard_normal((width, _RANK), dtype=np.float32),
    }
    save_file(tensors, directory / WEIGHTS_NAME)
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_bytes(msgspec.json.encode(fields))
    return directory


def _bytes_ms(url: str, digest: str, directory: Path) -> float:
    """Into a file, unlooked at: what the link and the disk's cache allow."""
    start_s = time.perf_counter()
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    path = f"{AGENT_FILES_PATH}/{digest}/{WEIGHTS_NAME}"
    connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    buffer = memoryview(bytearray(1 << 20))
    num_bytes = 0
    with (directory / "copy").open("wb", buffering=0) as file:
        while number := response.readinto(buffer):
            num_bytes += number
            file.write(buffer[:number])
    taken_ms = 1e3 * (time.perf_counter() - start_s)
    connection.close()
    assert num_bytes > _NUM_BYTES, num_bytes
    (directory / "copy").unlink()
    return taken_ms


async def _fetch_ms(url: str, digest: str, directory: Path) -> float:
    """As an agent does it for an engine's first request."""
    store = AdapterFileStore(directory, 1 << 40)
    fetcher = Fetcher(store, KEY, _release)
    entry = AdapterEntry(
        name="a", revision=1, digest=digest, rank=_RANK, num_bytes=_NUM_BYTES, source="/nowhere"
    )
    try:
        start_s = time.perf_counter()
        await fetcher.ensure(entry, [url])
        return 1e3 * (time.perf_counter() - start_s)
    finally:
        await fetcher.close()
        store.close()
        subprocess.run(["rm", "-rf", str(directory)], check=True)


async def _serve(directory: Path) -> None:
    """Run the peer until it is stopped."""
    store = AdapterFileStore(directory, 1 << 40)
    async with agent_of(store) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
