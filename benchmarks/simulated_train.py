"""How long is a step of FSDP in which nothing travels? train_fsdp.py with ranks that do not exist.

    WORLD_SIZE=2 python benchmarks/simulated_train.py --scaling-strategy all --scaling-factor 2

Rank 0 of that many: it computes, copies and updates as in a real job, but what it gathers is its
own shard, repeated, and what it reduces is its own gradient. The losses are those of no model.
"""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed import ExchangeAndSum, launched_world_size, shard, simulated_world
from trainer import FSDPTrainConfig, Inputs, build_model, materialize, run, running_job, train


class ExchangeWithItself(ExchangeAndSum):
    """It receives what it sent: fake process groups leave what arrives uninitialised.

    Weights would become NaN, and a GPU that multiplies NaN draws less power and clocks higher.
    """

    def exchange(self, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Nothing travels."""
        return sent


class OwnChunk(ExchangeAndSum):
    """The same in place of a reduce-scatter."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """This rank's own chunk, with nothing added."""
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


def main(config: FSDPTrainConfig, inputs: Inputs) -> None:
    """As in train_fsdp.py, in a simulated world."""
    world_size = launched_world_size()
    with simulated_world(world_size) as world, running_job(config, inputs, world) as job:
        model = build_model(config, inputs)
        sharding = config.sharding(inputs)
        shard(model, world, sharding)
        reduction = ExchangeWithItself() if sharding.exchange_gradients else OwnChunk()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduction)  # pyright: ignore[reportArgumentType]
        materialize(model, config, world)
        train(model, job)


if __name__ == "__main__":
    run(main, FSDPTrainConfig)
