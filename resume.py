"""When is a run's state saved, and how does a run go on from it?

A save stops training for the copy to the host; a thread writes it to disk while training goes on.
"""

import time
import warnings
from collections.abc import Sequence
from concurrent import futures
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from checkpoint import Checkpoint, Progress, keep_newest, load, reason_of, remove_partial, save
from dataset import Position
from distributed import SLOW_PHASE_S
from job import Job
from model import Transformer
from optimizer import local_tensor, make_moments
from train_config import run_identity
from utils import GIB, keep_from_forks, random_state, set_random_state, synchronize, warn
from weights import init_weights


def training_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Weights and both moments of AdamW, by name; sharded tensors stay so."""
    make_moments(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors[f"model.{name}"] = parameter.detach()
        tensors[f"exp_avg.{name}"] = state["exp_avg"]
        tensors[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return tensors


class Checkpoints:
    """Saves a run as it goes, and puts it back at its start; does nothing where not asked to."""

    def __init__(self, model: Transformer, optimizer: torch.optim.AdamW, job: Job) -> None:
        self.model, self.optimizer, self.job = model, optimizer, job
        self.parent = job.config.checkpoint_dir
        self.saved_step = 0
        self._positions: Sequence[Position] = ()
        self._host: dict[str, Tensor] = {}
        # The copy needs page-locked memory to be fast; making that takes longer than one copy.
        self._pin = job.world.device.type == "cuda" and job.config.checkpoint_every > 0
        self._writer = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: futures.Future[dict[str, float]] | None = None
        self._pending_step = 0
        self._group: dist.ProcessGroup | None = None
        # One process saves alone, as it should.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        if dist.is_initialized() and (self.parent is not None or job.inputs.resumable):
            # Of its own: the loop's sums may come between those of a save.
            timeout = timedelta(seconds=2 * SLOW_PHASE_S)
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    def restore(self) -> Sequence[Position] | None:
        """Put the newest usable checkpoint's state in place; where its data goes on, else None.

        Raises ValueError where the checkpoint that was asked for cannot be read.
        """
        job, candidates = self.job, self.job.inputs.resumable
        with job.phase("restore"):
            self._check_agreement()
            if self.parent is not None and job.world.rank == 0:
                remove_partial(self.parent)
            found = next((each for each in candidates if self._load(each)), None)
            job.steps_done = self.saved_step = found.progress.step if found else 0
            if candidates and found is not candidates[0]:
                job.resumed_from_step = found.progress.step if found else None
                job.write_run()
            if candidates and found is None:
                self._begin_anew()
            if self._pin:
                self._copy_to_host(training_state(self.model, self.optimizer))
                keep_from_forks(self._host.values())  # data workers are forks
        if found is None:
            return None
        return [(document, offset) for document, offset in found.progress.positions]

    def after_step(self, positions: Sequence[Position]) -> None:
        """Note where this rank's rows go on after a step, and save if one is due."""
        self._positions = positions
        every = self.job.config.checkpoint_every
        if self._pending is not None and self._pending.done():
            self._collect()
        if every and self.job.steps_done % every == 0:
            self._save()

    def finish(self) -> None:
        """Save the last step unless that was done, and wait until it is on disk."""
        self._wait()
        if self.parent is not None and self.job.steps_done > self.saved_step:
            self._save()
            self._wait()
        self._writer.shutdown()

    def _check_agreement(self) -> None:
        step = float(self.job.resumed_from_step or 0)
        highest, minus_lowest = self.job.world.max_host([step, -step])
        if highest != -minus_lowest:
            raise ValueError(
                "the ranks see different checkpoints: --checkpoint-dir must be on a file system "
                "that all nodes share"
            )

    def _load(self, checkpoint: Checkpoint) -> bool:
        progress, device = checkpoint.progress, self.job.world.device
        tensors = training_state(self.model, self.optimizer)
        try:
            load(tensors, checkpoint, self._group)
            set_random_state(progress.random, device)
        except (dcp.CheckpointException, LookupError, TypeError, ValueError, RuntimeError) as error:
            text = f"{checkpoint.folder} cannot be read ({reason_of(error)})"
            if self.job.config.resume != "auto":
                raise ValueError(text) from None
            warn(f"skipped: {text}")
            return False
        for state in self.optimizer.state.values():
            state["step"].fill_(progress.optimizer_steps)
        return True

    def _begin_anew(self) -> None:
        """Undo what reading damaged checkpoints may have left."""
        seed, model = self.job.config.set_seed, self.model
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        init_weights(model, seed=seed, device=self.job.world.device, init_std=model.init_std)

    def _copy_to_host(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local = local_tensor(tensor)
            if name not in self._host:
                self._host[name] = torch.empty_like(local, device="cpu", pin_memory=self._pin)
            self._host[name].copy_(local, non_blocking=True)
        synchronize(self.job.world.device)

    def _save(self) -> None:
        """Copy the state to the host, and start writing it; an earlier save is waited for."""
        self._wait()
        job, world = self.job, self.job.world
        started = time.perf_counter()
        with job.phase("save"):
            tensors = training_state(self.model, self.optimizer)
            self._copy_to_host(tensors)
            num_updates = int(next(iter(self.optimizer.state.values()))["step"].item())
            identity, state = run_identity(job.config, job.inputs), random_state(world.device)
            positions = self._all_positions()
            progress = Progress(job.steps_done, positions, num_updates, state, identity)
        stopped_s = time.perf_counter() - started

        def write() -> dict[str, float]:
            assert self.parent is not None
            folder = save(tensors, self._host, self.parent, progress, self._group)
            seconds = time.perf_counter() - started
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
            if world.rank == 0:
                keep_newest(self.parent, job.config.keep, progress.step)
            record = {"stopped_s": stopped_s, "seconds": seconds, "gib": num_bytes / GIB}
            return {"step": progress.step} | {name: round(record[name], 4) for name in record}

        self._pending_step = progress.step
        self._pending = self._writer.submit(write)

    def _all_positions(self) -> list[list[int]]:
        """Positions of all rows of the global batch: each rank fills in its own."""
        world, num_local = self.job.world, len(self._positions)
        flat = [0.0] * (2 * num_local * world.size)
        for row, position in enumerate(self._positions, start=world.rank * num_local):
            flat[2 * row : 2 * row + 2] = map(float, position)
        numbers = [int(number) for number in world.sum_host(flat)]  # exact up to 2^53
        return [numbers[place : place + 2] for place in range(0, len(numbers), 2)]

    def _wait(self) -> None:
        if self._pending is None:
            return
        deadline = time.monotonic() + SLOW_PHASE_S
        with self.job.phase("save"):
            while not futures.wait([self._pending], timeout=1.0).done:
                if time.monotonic() < deadline:
                    self.job.watch.beat()
            self._collect()

    def _collect(self) -> None:
        """Say how a save went; one that failed costs no training."""
        assert self._pending is not None
        error = self._pending.exception()
        if error is not None:
            warn(f"the checkpoint of step {self._pending_step} was not saved: {reason_of(error)}")
        else:
            self.saved_step = self._pending_step
            if self.job.world.rank == 0:
                self.job.log.record("Checkpoint", self._pending.result())
        self._pending = None
