"""What does a run say about itself: its log, how far it came, and how it ended."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

import utils
from breakdown import Interval, largest_kernels, seconds_by_kind
from distributed import SLOW_PHASE_S, Failure, Watch, World, describe_failure, leave
from hardware import peak_tflops
from model import count_params
from processes import lock_folder
from run_log import SCHEMA_VERSION, LogWriter, StepRecord
from train_config import Inputs, TrainConfig, is_graphed, memory_setup

# A process gives no sign of life while one call holds Python's lock: reading a long profile, say.
SILENT_TIMEOUTS = 4
# Flags that hold a path.
_PATHS = "log_file profile_dir dataset tokenizer_name_or_path checkpoint_dir resume".split()


class Job:
    """What a run says about itself: its log, how far it came, and how it ended."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World) -> None:
        self.config, self.inputs, self.world = config, inputs, world
        self.log = LogWriter(config.log_file)
        self.watch = Watch(
            world, self._write_failure, SILENT_TIMEOUTS * config.collective_timeout_s
        )
        self.seconds: dict[str, float] = {}
        self.num_graphs_at_first_step: int | None = None
        self.digest: dict[str, Any] | None = None
        self.resumed_from_step = inputs.resumable[0].progress.step if inputs.resumable else None
        self.steps_done = self.resumed_from_step or 0
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the job is doing, and add the time to its ``End:`` record."""
        self.watch.phase = name
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def write_run(self) -> None:
        """Write the ``Run:`` record (rank 0)."""
        if self.world.rank == 0:
            record = describe_run(self.config, self.inputs, self.world)
            self.log.record("Run", record | {"resumed_from_step": self.resumed_from_step})

    def write_end(self, status: str, reason: str = "") -> None:
        """Write the ``End:`` record (rank 0) with the peak memory of all ranks."""
        peak_gib, reserved_gib = self.world.max_host(utils.peak_memory_gib(self.world.device))
        if self.world.rank:
            return
        peaks = {"peak_gib": peak_gib, "peak_reserved_gib": reserved_gib}
        fields = self._end_fields(status, reason)
        self.log.record("End", fields | peaks | {"digest": self.digest})

    def _write_failure(self, failure: Failure) -> None:
        """The record of a job that failed; called from whichever thread noticed, without sums."""
        reason = f"{failure.reason} (rank {failure.rank})"
        fields = self._end_fields(failure.status, reason) | {"phase": failure.phase}
        self.log.record("End", fields)
        text = f"{failure.status} in {failure.phase} after step {self.steps_done}: {reason}"
        print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)

    def _end_fields(self, status: str, reason: str) -> dict[str, Any]:
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        seconds["total"] = round(time.perf_counter() - self._started, 3)
        _, num_graphs = utils.compilations()
        late = num_graphs - (self.num_graphs_at_first_step or num_graphs)
        return {
            "status": status, "reason": reason, "steps_done": self.steps_done, "seconds": seconds,
            "num_graphs_compiled": num_graphs, "compiled_after_first_step": late,
        }  # fmt: skip


def peak_of(config: TrainConfig, world: World) -> float | None:
    """Dense bf16 peak in TFLOP/s that MFU is held against: the flag, else by device name."""
    return config.peak_tflops or peak_tflops(utils.device_name(world.device))


def describe_run(config: TrainConfig, inputs: Inputs, world: World) -> dict[str, Any]:
    """Fields of the ``Run:`` record: all that a reader needs to repeat or to compare the run."""
    settings = asdict(config)
    for name in _PATHS:
        if settings[name] is not None:
            settings[name] = _without_folders(str(settings[name]))
    corpus, tokenizer = inputs.corpus, inputs.tokenizer
    return {
        "schema": SCHEMA_VERSION, "script": os.path.basename(sys.argv[0]),
        "argv": [_without_folders(word) for word in sys.argv[1:]],
        "config": settings, "fsdp": config.fsdp, **utils.source_version(),
        "versions": utils.versions(), "nccl_environment": utils.nccl_environment(),
        "device": utils.device_name(world.device), "device_type": world.device.type,
        "device_memory_gib": utils.device_memory_gib(world.device),
        "compute_dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "peak_tflops": peak_of(config, world), "world_size": world.size,
        "cuda_graph": is_graphed(config, inputs, world.device.type),
        "gradients_exchanged": memory_setup(config, inputs).exchanged,
        "num_nodes": world.num_nodes, "replicas": getattr(config, "replicas", 1),
        "global_batch": inputs.global_batch,
        "tokens_per_step": inputs.global_batch * config.sequence_length,
        "num_parameters": count_params(inputs.model_config),
        "flops_per_token": inputs.flops_per_token, "model": asdict(inputs.model_config),
        "data": {"fingerprint": corpus.fingerprint, "num_documents": corpus.num_documents},
        "tokenizer": {
            "name": _without_folders(tokenizer.name), "vocab_size": tokenizer.vocab_size,
        },
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }  # fmt: skip


def _without_folders(word: str) -> str:
    """A flag, or its value, without the folders of this machine."""
    flag, equals, value = word.rpartition("=")
    return f"{flag}{equals}{utils.relative_path(value)}" if Path(value).is_absolute() else word


@contextlib.contextmanager
def running_job(config: TrainConfig, inputs: Inputs, world: World) -> Iterator[Job]:
    """Watch over a run: a failure of any rank ends them all, with one ``End:`` record.

    Raises ValueError where another run saves in its --checkpoint-dir.
    """
    if config.checkpoint_dir is not None:
        lock_folder(config.checkpoint_dir)
    job = Job(config, inputs, world)
    job.watch.start()
    try:
        job.write_run()
        yield job
    except Exception as error:
        job.watch.end(describe_failure(error, job.watch.phase, world.rank))
    job.watch.close()
    job.log.close()
    if job.watch.stop_agreed:
        leave("preempted")


class Meter:
    """Tokens and time since the last log line, and the line itself."""

    def __init__(self, job: Job) -> None:
        self.job = job
        config, inputs = job.config, job.inputs
        self.positions_per_step = inputs.global_batch * config.sequence_length
        self.peak_tflops = peak_of(config, job.world)
        self.patience_s = SLOW_PHASE_S
        self._num_steps = 0
        self._num_training_tokens = 0.0
        self._last_training_tokens = 0.0
        self._clock = time.perf_counter()

    def add(self, num_training_tokens: float) -> None:
        """Count one step."""
        self._num_steps += 1
        self._num_training_tokens += num_training_tokens
        self._last_training_tokens = num_training_tokens

    def log(
        self, step: int, loss_sum: Tensor, grad_norm: Tensor, first_bad_step: Tensor, rate: float
    ) -> None:
        """Log one step. Raises FloatingPointError if a loss was not finite since the last line."""
        job, world = self.job, self.job.world
        # Reading these waits for the GPU: every step so far has ended when the clock is read.
        [loss_total] = world.sum_host([loss_sum.item()])
        peaks = utils.peak_memory_gib(world.device)
        peak_gib, reserved_gib, minus_bad = world.max_host([*peaks, -first_bad_step.item()])
        now = time.perf_counter()
        step_s = (now - self._clock) / self._num_steps
        tokens_per_s = self.positions_per_step / world.size / step_s
        num_positions = self.positions_per_step * self._num_steps
        tflops = tokens_per_s * job.inputs.flops_per_token / 1e12
        record = StepRecord(
            step=step, tokens_per_s=tokens_per_s, tflops=tflops, grad_norm=grad_norm.item(),
            loss=loss_total / self._last_training_tokens if self._last_training_tokens else 0.0,
            training_tokens_pct=100 * self._num_training_tokens / num_positions,
            mfu_pct=100 * tflops / self.peak_tflops if self.peak_tflops else None,
            learning_rate=rate, step_s=step_s, peak_gib=peak_gib, peak_reserved_gib=reserved_gib,
        )  # fmt: skip
        if world.rank == 0:
            job.log.step(record)
        if step == (job.resumed_from_step or 0) + 1:
            job.seconds["until first step"] = now - utils.TORCH_IMPORTED_AT
            job.seconds["compile"], job.num_graphs_at_first_step = utils.compilations()
        # The CPU runs ahead of the GPU and waits at log steps: for all steps in between.
        slow_s = 5 * step_s * job.config.logging_frequency
        self.patience_s = max(job.config.collective_timeout_s, slow_s)
        self._num_steps, self._num_training_tokens = 0, 0.0
        self._clock = now
        if job.config.fail_on_nonfinite and minus_bad > float("-inf"):
            raise FloatingPointError(
                f"the loss of step {-minus_bad:.0f} is not finite; lower --learning-rate, "
                "or go on with --no-fail-on-nonfinite"
            )


class Profiler:
    """A trace of some steps, bracketed for nsys as well, and where their time went (rank 0)."""

    def __init__(self, job: Job) -> None:
        self.config, self.world, self.log = job.config, job.world, job.log
        self.trace: torch.profiler.profile | None = None
        self._num_steps = 0
        self._clock = 0.0

    def before(self, step: int) -> None:
        """Start at the first profiled step."""
        if self.config.profile and step == self.config.profile_step_start:
            utils.synchronize(self.world.device)  # the kernels of earlier steps are not ours
            self.trace = torch.profiler.profile()
            self.trace.start()
            if self.world.device.type == "cuda":
                torch.cuda.profiler.start()
            self._clock = time.perf_counter()

    def after(self, step: int) -> None:
        """Stop after the last profiled step."""
        self._num_steps += self.trace is not None
        if step == self.config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stop and write the trace and its ``Breakdown:`` record, if one is being made."""
        if self.trace is None:
            return
        trace, self.trace = self.trace, None
        utils.synchronize(self.world.device)
        wall_s = time.perf_counter() - self._clock
        if self.world.device.type == "cuda":
            torch.cuda.profiler.stop()
        trace.stop()
        self.config.profile_dir.mkdir(parents=True, exist_ok=True)
        path = self.config.profile_dir / f"trace-rank{self.world.rank}.json"
        trace.export_chrome_trace(str(path))
        if self.world.rank == 0 and self._num_steps:
            self.log.record("Breakdown", self._breakdown(trace, wall_s))

    def _breakdown(self, trace: torch.profiler.profile, wall_s: float) -> dict[str, Any]:
        intervals = profiled_intervals(trace, self.world.device)
        seconds = seconds_by_kind(intervals, wall_s)
        total_s, num_steps = sum(seconds.values()), self._num_steps
        return {
            "first_step": self.config.profile_step_start,
            "num_steps": num_steps,
            "wall_s_per_step": wall_s / num_steps,
            "num_kernels_per_step": len(intervals) / num_steps,
            "seconds_per_step": {kind: value / num_steps for kind, value in seconds.items()},
            "shares": {kind: value / total_s for kind, value in seconds.items()},
            "largest_kernels": {
                name: value / num_steps for name, value in largest_kernels(intervals).items()
            },
        }


def profiled_intervals(trace: torch.profiler.profile, device: torch.device) -> list[Interval]:
    """What ran on the device: kernels and copies; on a CPU its operators, also nested ones.

    Ranges that only bear a name (of the optimizer's step, of an FSDP hook) are left out.
    """
    on_gpu = device.type == "cuda"
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == wanted
        and not event.is_user_annotation
        and (on_gpu or event.name.startswith(("aten::", "gloo:", "c10d::")))
    ]
