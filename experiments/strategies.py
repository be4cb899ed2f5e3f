"""How Lightning sees the processes of a run: one alone, with a model each (DDP), or with a share of one each (FSDP)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from arch.language_model import LanguageModel
from experiments.config import Trainer
from experiments.ranks import Group, Place


class Met(ClusterEnvironment):
    """Processes that have met already: Lightning starts none, and re-runs no command line."""

    creates_processes_externally = True
    # torch.distributed is initialised; nobody reads them.
    main_address, main_port = "", 0

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.place.ranks

    def set_world_size(self, size: int) -> None:
        """It is fixed."""

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """It is fixed."""

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node


class Writer(TorchCheckpointIO):
    """Keeps what goes wrong for the saver to raise: the other processes wait for this one behind the writing.

    Attributes:
        fault: of the last checkpoint; None where it was written.
    """

    fault: OSError | RuntimeError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        self.fault = None
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except (OSError, RuntimeError) as error:
            self.fault = error


def shard(net: LanguageModel, mesh: DeviceMesh) -> None:
    """Divide the weights among the processes (FSDP2): a block's are gathered while it runs, the rest at the start."""
    # Layers that share weights have one block.
    for block in dict.fromkeys(block for stack in net.stacks for block in stack.blocks):
        fully_shard(block, mesh=mesh)
        register_fsdp_forward_method(block, "mix")
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    for name in ("encode", "hidden"):
        if hasattr(net, name):
            register_fsdp_forward_method(net, name)


def strategy(options: Trainer, group: Group) -> dict[str, Any]:
    """The arguments of Lightning's Trainer that say where a run's processes are."""
    if group.place is None:
        # No other environment: inside of a Slurm job, Lightning would look for its other processes.
        return {"devices": 1, "plugins": [LightningEnvironment(), Writer()]}
    if options.strategy == "fsdp":
        how = ModelParallelStrategy(data_parallel_size=group.ranks, tensor_parallel_size=1,
                                    save_distributed_checkpoint=False)
    else:
        # Buffers are tables, the same everywhere; and not all processes have as many batches to evaluate.
        how = DDPStrategy(broadcast_buffers=False)
    return {"devices": options.devices_per_node, "num_nodes": options.num_nodes, "strategy": how,
            "plugins": [Met(group.place), Writer()]}
