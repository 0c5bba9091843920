"""Train a Llama-style Transformer on one device, without FSDP.

    python train.py --scaling-strategy all --scaling-factor 2

Prints the job log: a ``Run:`` record, a ``Step:`` line per logged step, an ``End:`` record.
``diff train.py train_fsdp.py`` shows all that FSDP changes.
"""

from distributed import single_world
from trainer import Inputs, TrainConfig, build_model, materialize, run, running_job, train


def main(config: TrainConfig, inputs: Inputs) -> None:
    """Build the model on the meta device, give this rank its weights, train it."""
    with single_world() as world, running_job(config, inputs, world) as job:
        model = build_model(config, inputs)
        materialize(model, config, world)
        train(model, job)


if __name__ == "__main__":
    run(main, TrainConfig)
