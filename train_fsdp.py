"""Train a Llama-style Transformer with Fully Sharded Data Parallel (FSDP2), one rank per device.

    torchrun --standalone --nproc-per-node 2 train_fsdp.py --scaling-strategy all --scaling-factor 2

Prints the job log: a ``Run:`` record, a ``Step:`` line per logged step, an ``End:`` record.
``diff train.py train_fsdp.py`` shows all that FSDP changes.
"""

from distributed import shard, sharded_world
from trainer import FSDPTrainConfig, Inputs, build_model, materialize, run, running_job, train


def main(config: FSDPTrainConfig, inputs: Inputs) -> None:
    """Build the model on the meta device, give this rank its weights, train it."""
    with sharded_world(config.replicas) as world, running_job(config, inputs, world) as job:
        model = build_model(config, inputs)
        shard(model, world, config.sharding(inputs))
        materialize(model, config, world)
        train(model, job)


if __name__ == "__main__":
    run(main, FSDPTrainConfig)
