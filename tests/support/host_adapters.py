"""A store of packed adapters over the files of PEFT, on the CPU device."""

from pathlib import Path

import torch
from corun.gpu.adapters.host import ArenaSize, HostAdapters
from corun.gpu.device.host_memory import TorchDevice
from corun.gpu.lora.numba_backend import NumbaLora
from corun.gpu.lora.table import LoraTable
from corun.gpu.lora.torch_backend import TorchLora
from corun.gpu.model.targets import build_target_map
from corun.runtime.adapters.load import open_adapter
from corun.runtime.adapters.resolved import AdapterReader
from corun.runtime.adapters.target_map import TargetMap

from .architectures import make_model
from .gated_files import FileGate

BACKENDS = {"numba": NumbaLora, "torch": TorchLora}


class Host:
    """Everything between the files of adapters and the table of the kernels."""

    def __init__(
        self, device: TorchDevice, size: ArenaSize, *,
        backend: str = "torch", dtype: torch.dtype = torch.float32,
        architecture: str = "llama3-rope", gate: FileGate | None = None,
    ) -> None:  # fmt: skip
        """``gate``: holds what is read again."""
        self.target_map: TargetMap = build_target_map(make_model(architecture))
        self.table = LoraTable(len(self.target_map.targets), 8, "cpu")
        self.backend = BACKENDS[backend](self.table, dtype=dtype)
        self.device = device
        self.num_opened = 0
        self._gate = gate or FileGate()
        self.adapters = HostAdapters(
            device, self.backend, dtype, torch.device("cpu"), self.target_map, size, self._open
        )
        self.arena = self.adapters.arena

    def _open(self, path: str) -> AdapterReader:
        self.num_opened += 1
        return self._gate.wrap(open_adapter(Path(path), self.target_map, max_rank=64))


def shared(budget_bytes: int, idle_bytes: int | None = None) -> ArenaSize:
    """An arena that is the device's memory."""
    idle_bytes = budget_bytes if idle_bytes is None else idle_bytes
    return ArenaSize(2 * budget_bytes, True, budget_bytes, idle_bytes)


def copied(num_bytes: int) -> ArenaSize:
    """An arena that adapters are copied from."""
    return ArenaSize(num_bytes, is_elastic=True)
