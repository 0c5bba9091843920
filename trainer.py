"""The training loop that train.py and train_fsdp.py share."""

import contextlib
import gc
import os
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import torch
from tqdm import tqdm

from attention import attention_order
from cli import parse_flags, refuse
from dataset import Position, StepRows, build_loader
from distributed import World, leave
from job import Job, Meter, Profiler
from job import running_job as running_job  # for the scripts
from model import Transformer
from optimizer import local_tensor
from resume import Checkpoints
from step import build_step, learning_rate
from train_config import FSDPTrainConfig as FSDPTrainConfig
from train_config import Inputs, TrainConfig, describe_plan, open_inputs
from utils import DTYPES, keep_from_forks, make_deterministic, seed_everything
from weights import digest_weights, init_weights

STEPS_PER_COLLECTION = 100

ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def run(main: Callable[[ConfigT, Inputs], None], config_class: type[ConfigT]) -> None:
    """Read the flags, check every input, and call the script's main (or only print the plan)."""
    config = parse_flags(config_class)
    try:
        inputs = open_inputs(config)
        if config.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(describe_plan(config, inputs))
            return
        main(config, inputs)
    except ValueError as error:
        refuse(error)
    if config.fsdp:
        leave("completed")


def build_model(config: TrainConfig, inputs: Inputs) -> Transformer:
    """The model on the meta device: shapes and dtypes, no memory."""
    seed_everything(config.set_seed)
    if config.deterministic:
        make_deterministic()
    with torch.device("meta"):
        model = Transformer(
            inputs.model_config,
            sequence_length=config.sequence_length,
            compute_dtype=inputs.compute_dtype,
            checkpointing=config.activation_checkpointing,
        )
    model = model.to(DTYPES[config.model_dtype])
    if config.compile:
        model.compile_parts()
    return model


def materialize(model: Transformer, config: TrainConfig, world: World) -> None:
    """Allocate this rank's share of the weights and fill it from the seed."""
    on_host = getattr(config, "cpu_offload", False)
    model.to_empty(device="cpu" if on_host else world.device)
    model.build_rope_tables(world.device)
    init_weights(model, seed=config.set_seed, device=world.device, init_std=model.init_std)
    if on_host and world.device.type == "cuda":  # page-locked; data workers are forks
        keep_from_forks(local_tensor(parameter) for parameter in model.parameters())


def train(model: Transformer, job: Job) -> None:
    """Train for the configured number of steps, logging as the flags say."""
    config, world, watch = job.config, job.world, job.watch
    take_step = build_step(model, config, job.inputs, world, watch.set_phase)
    checkpoints = Checkpoints(model, take_step.optimizer, job)
    positions = checkpoints.restore()
    meter = Meter(job)
    never = torch.full((), float("inf"), device=world.device)
    zero, this_step, first_bad_step = torch.zeros_like(never), never.clone(), never.clone()
    with contextlib.ExitStack() as stack:
        stack.enter_context(attention_order(world.device))
        # Garbage is collected at chosen steps only, alike on all ranks: who pauses makes all wait.
        gc.disable()
        stack.callback(gc.enable)
        loader = stack.enter_context(contextlib.closing(open_loader(job, positions)))
        bar = stack.enter_context(progress_bar(config, world, job.steps_done))
        profiler = stack.enter_context(contextlib.closing(Profiler(job)))
        for step in range(first := job.steps_done + 1, config.training_steps + 1):
            with job.phase("data"):
                rows = next(loader)
            # The only sum that the host waits for, before the forward: the GPU has work meanwhile.
            num_tokens, stop = world.sum_host([rows.num_training_tokens, watch.stop_requested])
            if stop:
                watch.stop_agreed = True
                break
            profiler.before(step)
            rate = learning_rate(config, step)
            loss_sum, grad_norm = zero, zero
            if num_tokens:  # without one, even a zero gradient would move weights (AdamW decays)
                loss_sum, grad_norm = take_step(
                    rows.input_ids_RT,
                    rows.labels_RT,
                    loss_scale=1 / num_tokens,
                    rate=rate,
                )
            # Filled, not made: a number of the host's in torch.where would wait for the GPU.
            bad_step = torch.where(loss_sum.isfinite(), never, this_step.fill_(step))
            first_bad_step = torch.minimum(first_bad_step, bad_step)
            meter.add(num_tokens)
            if is_logged(step, config):
                meter.log(step, loss_sum, grad_norm, first_bad_step, rate)
            watch.beat()  # writing a trace takes its time
            profiler.after(step)
            job.steps_done = step
            checkpoints.after_step(rows.positions)
            watch.beat(meter.patience_s)
            bar.update()
            if (step - first) % STEPS_PER_COLLECTION == 0:
                gc.collect()
                gc.freeze()  # what lives until now stays: later collections take no time
    checkpoints.finish()
    finish(model, job)


def finish(model: Transformer, job: Job) -> None:
    """Digest the weights and write the ``End:`` record of a run that was not cut short."""
    config, world = job.config, job.world
    job.watch.beat()
    if config.digest:
        with job.phase("digest"):
            job.digest = digest_weights(
                model,
                seed=config.set_seed,
                device=world.device,
                init_std=model.init_std,
                sum_over_shards=world.sum_over_shards,
            )
    stopped = job.watch.stop_agreed
    reason = f"a signal asked to stop; ended after step {job.steps_done}" if stopped else ""
    job.write_end("preempted" if stopped else "completed", reason)


def is_logged(step: int, config: TrainConfig) -> bool:
    """The first step, every n-th and the last."""
    return step in (1, config.training_steps) or step % config.logging_frequency == 0


def open_loader(job: Job, positions: Sequence[Position] | None) -> Generator[StepRows, None, None]:
    """This rank's rows of every global batch, from ``positions`` on (None: from the beginning)."""
    config, inputs, world = job.config, job.inputs, job.world
    num_rows = inputs.global_batch // world.size
    return build_loader(
        inputs.corpus,
        inputs.tokenizer,
        sequence_length=config.sequence_length,
        rows=range(world.rank * num_rows, (world.rank + 1) * num_rows),
        global_rows=inputs.global_batch,
        seed=config.set_seed,
        packing=config.packing,
        num_workers=config.num_workers,
        positions=positions,
        pin_memory=world.device.type == "cuda",
    )


def progress_bar(config: TrainConfig, world: World, first: int) -> tqdm:
    """A bar on a terminal's standard error; none in a job log."""
    hidden = world.rank != 0 or None  # None: tqdm looks whether it is a terminal
    return tqdm(
        total=config.training_steps, initial=first, unit="step", disable=hidden, leave=False
    )
