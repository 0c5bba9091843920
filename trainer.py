"""The training loop that train.py and train_fsdp.py share, its flags and its log."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cli import parse_flags, refuse
from dataset import Corpus, StepRows, Tokenizer, build_loader, load_tokenizer, open_corpus
from distributed import (
    EXIT_STATUS,
    SLOW_PHASE_S,
    Failure,
    Sharding,
    Watch,
    World,
    describe_failure,
    launched_world_size,
    local_tensor,
)
from hardware import peak_tflops
from model import (
    ActivationCheckpointing,
    ScalingStrategy,
    Transformer,
    TransformerConfig,
    build_config,
    count_params,
    flops_per_token,
)
from run_log import SCHEMA_VERSION, LogWriter, StepRecord
from utils import (
    DTYPES,
    GIB,
    TORCH_IMPORTED_AT,
    DtypeName,
    device_name,
    make_deterministic,
    peak_memory_gib,
    relative_path,
    seed_everything,
    source_version,
    versions,
)
from weights import digest_weights, init_weights

OPTIMIZER_STATES = 2  # AdamW: first and second moment, in the dtype of the parameters


@dataclass(frozen=True)
class TrainConfig:
    """Flags of both training scripts; the field docstrings are their help."""

    dataset: str = "data/sample.parquet"
    """Parquet file, folder of them, or glob, with a column `text`."""
    tokenizer_name_or_path: str = "tekken"
    """`tekken` (Mistral NeMo, 131,072 tokens), a tokenizer.json or its folder, or a hub id."""
    sequence_length: int = 4096
    """Tokens per row."""
    batch_size: int = 1
    """Rows per rank in one micro-batch."""
    grad_accumulation_steps: int = 1
    """Micro-batches per step."""
    packing: bool = True
    """Join documents and cut them into full rows; without it, one padded document per row."""
    num_workers: int = 1
    """Processes per rank that read and tokenize (0: the training process does)."""
    training_steps: int = 1000
    """Steps to train."""
    learning_rate: float = 1e-5
    """Learning rate of AdamW after the warm-up."""
    lr_warmup_steps: int = 10
    """Steps of linear warm-up; constant afterwards."""
    grad_max_norm: float = 1.0
    """Clip the norm of the whole gradient to this."""
    logging_frequency: int = 5
    """Log the first step, every n-th and the last."""
    scaling_strategy: ScalingStrategy = "all"
    """Grow width and depth together (`all`) or depth alone (`n_layers`)."""
    scaling_factor: int = 1
    """How far to grow the model, from 1."""
    set_seed: int = 42
    """Seed of the initial weights and of the order of the data."""
    model_dtype: DtypeName = "bf16"
    """Dtype of parameters, gradients and optimizer state."""
    compute_dtype: DtypeName | None = None
    """Dtype of activations and matmuls (default: bf16 on GPUs, fp32 on CPU)."""
    fused_optimizer: bool = True
    """One fused kernel per group of parameters in AdamW."""
    compile: bool = field(default_factory=torch.cuda.is_available)
    """Compile each block and the loss with torch.compile (default: on GPUs)."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Replay a whole step as one CUDA graph; `auto`: without FSDP, where launching is the limit."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute in the backward nothing, the gate and up projections (`selective`), or all."""
    deterministic: bool = False
    """Use only kernels that give the same bits on every run."""
    fail_on_nonfinite: bool = True
    """End the job when a loss is NaN or infinite."""
    digest: bool = True
    """At the end, record random projections of (final - initial) weights."""
    profile: bool = False
    """Write a torch.profiler trace (and bracket the same steps for nsys)."""
    profile_step_start: int = 10
    """First profiled step."""
    profile_step_end: int = 12
    """Last profiled step."""
    profile_dir: Path = Path("profiles")
    """Folder of the traces."""
    peak_tflops: float | None = None
    """Dense bf16 peak of the GPU in TFLOP/s (default: from the device name)."""
    log_file: Path | None = None
    """Also append the log to this file."""
    collective_timeout_s: float = 45.0
    """A job that makes no progress for this long (once its first step is done) is ended."""
    dry_run: bool = False
    """Print what would be trained and the bytes of its states, then stop."""

    def __post_init__(self) -> None:
        at_least_one = (
            "sequence_length batch_size grad_accumulation_steps training_steps "
            "logging_frequency scaling_factor profile_step_start"
        )
        for name in at_least_one.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, not {getattr(self, name)}")
        for name in ("num_workers", "lr_warmup_steps", "set_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must not be negative, not {getattr(self, name)}")
        positive = ("learning_rate", "grad_max_norm", "collective_timeout_s", "peak_tflops")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{_flag(name)} must be greater than 0, not {value}")
        if self.profile and self.profile_step_end < self.profile_step_start:
            raise ValueError("--profile-step-end must not come before --profile-step-start")

    @property
    def fsdp(self) -> bool:
        """Whether the model is sharded."""
        return isinstance(self, FSDPTrainConfig)


@dataclass(frozen=True)
class FSDPTrainConfig(TrainConfig):
    """Flags of train_fsdp.py: those of train.py, and how to shard."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host between uses."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward (less memory, one more all-gather)."""
    replicas: int = 1
    """Copies of the model; each is sharded over the ranks of its own (HSDP)."""

    def sharding(self, inputs: "Inputs") -> Sharding:
        """How `shard` is to split the model."""
        return Sharding(inputs.compute_dtype, self.reshard_after_forward, self.cpu_offload)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas < 1 or launched_world_size() % self.replicas:
            raise ValueError(
                f"--replicas must divide the number of ranks ({launched_world_size()}), "
                f"not {self.replicas}"
            )


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads, opened and checked before anything is started or written."""

    corpus: Corpus
    tokenizer: Tokenizer
    model_config: TransformerConfig
    compute_dtype: torch.dtype
    global_batch: int
    flops_per_token: int


def open_inputs(config: TrainConfig) -> Inputs:
    """Open what the flags name. Raises ValueError, with what to do, for what cannot be used."""
    corpus = open_corpus(config.dataset)
    global_batch = launched_world_size() * config.batch_size * config.grad_accumulation_steps
    if corpus.num_documents < global_batch:
        raise ValueError(
            f"{config.dataset} holds {corpus.num_documents} documents, fewer than the "
            f"{global_batch} rows of a global batch; use a smaller --batch-size or more data"
        )
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    shape = build_config(config.scaling_strategy, config.scaling_factor, tokenizer.vocab_size)
    compute = config.compute_dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    cost = flops_per_token(shape, config.sequence_length)
    return Inputs(corpus, tokenizer, shape, DTYPES[compute], global_batch, cost)


ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def run(main: Callable[[ConfigT, Inputs], None], config_class: type[ConfigT]) -> None:
    """Read the flags, check every input, and call the script's main (or only print the plan)."""
    config = parse_flags(config_class)
    try:
        inputs = open_inputs(config)
        if config.dry_run:
            print(describe_plan(config, inputs))
            return
        main(config, inputs)
    except ValueError as error:
        refuse(error)


def describe_plan(config: TrainConfig, inputs: Inputs) -> str:
    """Parameters, FLOPs and tokens of a step, and the bytes of the states per GPU, as text."""
    num_params = count_params(inputs.model_config)
    num_shards = launched_world_size() // getattr(config, "replicas", 1)
    bytes_each = num_params * DTYPES[config.model_dtype].itemsize / num_shards
    place = "host memory" if getattr(config, "cpu_offload", False) else "device memory"
    rows = {
        "parameters": f"{num_params:,}",
        "FLOPs per token": f"{inputs.flops_per_token:,}",
        "tokens per step": f"{inputs.global_batch * config.sequence_length:,}",
        "documents": f"{inputs.corpus.num_documents:,}",
        f"parameters per rank, {place} (GiB)": f"{bytes_each / GIB:.2f}",
        "gradients per rank (GiB)": f"{bytes_each / GIB:.2f}",
        "optimizer state per rank (GiB)": f"{OPTIMIZER_STATES * bytes_each / GIB:.2f}",
    }
    return "\n".join(f"{name:<44}{value:>20}" for name, value in rows.items())


class Job:
    """What a run says about itself: its log, how far it came, and how it ended."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World) -> None:
        self.config, self.inputs, self.world = config, inputs, world
        self.log = LogWriter(config.log_file)
        self.watch = Watch(world, self._write_failure)
        self.seconds: dict[str, float] = {}
        self.steps_done = 0
        self.digest: dict[str, Any] | None = None
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
            self.log.record("Run", describe_run(self.config, self.inputs, self.world))

    def write_end(self, status: str, reason: str = "") -> None:
        """Write the ``End:`` record (rank 0) with the peak memory of all ranks."""
        peak_gib, reserved_gib = self.world.max_host(peak_memory_gib(self.world.device))
        if self.world.rank:
            return
        fields = self._end_fields(status, reason)
        self.log.record(
            "End",
            fields
            | {"peak_gib": peak_gib, "peak_reserved_gib": reserved_gib, "digest": self.digest},
        )

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
        return {
            "status": status,
            "reason": reason,
            "steps_done": self.steps_done,
            "seconds": seconds,
        }


def describe_run(config: TrainConfig, inputs: Inputs, world: World) -> dict[str, Any]:
    """Fields of the ``Run:`` record: all that a reader needs to repeat or to compare the run."""
    settings = asdict(config)
    for name in ("log_file", "profile_dir"):
        settings[name] = None if settings[name] is None else relative_path(settings[name])
    name = device_name(world.device)
    return {
        "schema": SCHEMA_VERSION,
        "script": os.path.basename(sys.argv[0]),
        "argv": sys.argv[1:],
        "config": settings,
        "fsdp": config.fsdp,
        **source_version(),
        "versions": versions(),
        "device": name,
        "device_type": world.device.type,
        "compute_dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "peak_tflops": config.peak_tflops or peak_tflops(name),
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "replicas": getattr(config, "replicas", 1),
        "global_batch": inputs.global_batch,
        "tokens_per_step": inputs.global_batch * config.sequence_length,
        "num_parameters": count_params(inputs.model_config),
        "flops_per_token": inputs.flops_per_token,
        "model": asdict(inputs.model_config),
        "data": {
            "fingerprint": inputs.corpus.fingerprint,
            "num_documents": inputs.corpus.num_documents,
        },
        "tokenizer": {"name": inputs.tokenizer.name, "vocab_size": inputs.tokenizer.vocab_size},
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


@contextlib.contextmanager
def running_job(config: TrainConfig, inputs: Inputs, world: World) -> Iterator[Job]:
    """Watch over a run: a failure of any rank ends them all, with one ``End:`` record."""
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
        sys.stdout.flush()
        os._exit(EXIT_STATUS["preempted"])


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


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with PyTorch's defaults (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, fused=config.fused_optimizer
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of one step (from 1): a linear warm-up whose last step has the full rate."""
    return config.learning_rate * min(1.0, step / max(1, config.lr_warmup_steps))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    *,
    world: World,
    num_training_tokens: float,
    max_norm: float,
    set_phase: Callable[[str], None] = lambda phase: None,
) -> tuple[Tensor, Tensor]:
    """Forward, backward, clipping and update of one step.

    ``microbatches`` holds this rank's (tokens, labels), each (B, T); ``num_training_tokens`` is the
    count over all ranks and micro-batches. FSDP averages gradients over ranks, so each summed loss
    is scaled by ranks / tokens: exact however unevenly the training tokens lie.
    Returns this rank's summed loss and the norm of the whole gradient before clipping, as scalars
    on the device.
    """
    local_loss_sum = torch.zeros((), device=world.device)
    for tokens_BT, labels_BT in microbatches:
        set_phase("forward")
        loss_sum = model(tokens_BT, labels_BT)
        set_phase("backward")
        (loss_sum * (world.size / num_training_tokens)).backward()
        local_loss_sum += loss_sum.detach()
    set_phase("optimizer")
    gradients = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    grad_norm = world.grad_norm(gradients)
    # Without a branch on the norm: reading it would make the CPU wait for the GPU.
    factor = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return local_loss_sum, grad_norm


def train(model: Transformer, job: Job) -> None:
    """Train for the configured number of steps, logging as the flags say."""
    config, world, watch = job.config, job.world, job.watch
    optimizer = build_optimizer(model, config)
    meter = Meter(job)
    first_bad_step = torch.full((), float("inf"), device=world.device)
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(contextlib.closing(open_loader(job)))
        bar = stack.enter_context(progress_bar(config, world))
        profiler = stack.enter_context(contextlib.closing(Profiler(config, world)))
        for step in range(1, config.training_steps + 1):
            watch.phase = "data"
            rows = next(loader)
            # The only sum that the host waits for, before the forward: the GPU has work meanwhile.
            num_tokens, stop = world.sum_host([rows.num_training_tokens, watch.stop_requested])
            if stop:
                watch.stop_agreed = True
                break
            profiler.before(step)
            rate = learning_rate(config, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss_sum = grad_norm = torch.zeros((), device=world.device)
            if num_tokens:  # without one, even a zero gradient would move weights (AdamW decays)
                loss_sum, grad_norm = train_step(
                    model,
                    optimizer,
                    to_microbatches(rows, config, world),
                    world=world,
                    num_training_tokens=num_tokens,
                    max_norm=config.grad_max_norm,
                    set_phase=watch.set_phase,
                )
            first_bad_step = torch.where(
                loss_sum.isfinite(), first_bad_step, first_bad_step.clamp(max=step)
            )
            meter.add(num_tokens)
            if is_logged(step, config):
                meter.log(step, loss_sum, grad_norm, first_bad_step, rate)
            profiler.after(step)
            job.steps_done = step
            watch.beat(meter.patience_s)
            bar.update()
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


def open_loader(job: Job) -> Iterator[StepRows]:
    """This rank's rows of every global batch."""
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
        pin_memory=world.device.type == "cuda",
    )


def to_microbatches(
    rows: StepRows, config: TrainConfig, world: World
) -> list[tuple[Tensor, Tensor]]:
    """Rows of this rank on its device, as (tokens, labels) of one micro-batch each."""
    tokens_RT = rows.input_ids_RT.to(world.device, non_blocking=True)
    labels_RT = rows.labels_RT.to(world.device, non_blocking=True)
    size = config.batch_size
    return list(zip(tokens_RT.split(size), labels_RT.split(size), strict=True))


def progress_bar(config: TrainConfig, world: World) -> tqdm:
    """A bar on a terminal's standard error; none in a job log."""
    hidden = world.rank != 0 or not sys.stderr.isatty()
    return tqdm(total=config.training_steps, unit="step", disable=hidden, leave=False)


class Meter:
    """Tokens and time since the last log line, and the line itself."""

    def __init__(self, job: Job) -> None:
        self.job = job
        config, inputs = job.config, job.inputs
        self.positions_per_step = inputs.global_batch * config.sequence_length
        self.peak_tflops = config.peak_tflops or peak_tflops(device_name(job.world.device))
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
        """Log one step. Raises FloatingPointError when a loss was not finite since the last line."""
        job, world = self.job, self.job.world
        # Reading these waits for the GPU: every step so far has ended when the clock is read.
        [loss_total] = world.sum_host([loss_sum.item()])
        peak_gib, reserved_gib, minus_bad = world.max_host(
            [*peak_memory_gib(world.device), -first_bad_step.item()]
        )
        now = time.perf_counter()
        step_s = (now - self._clock) / self._num_steps
        tokens_per_s = self.positions_per_step / world.size / step_s
        tflops = tokens_per_s * job.inputs.flops_per_token / 1e12
        record = StepRecord(
            step=step,
            loss=loss_total / self._last_training_tokens if self._last_training_tokens else 0.0,
            tokens_per_s=tokens_per_s,
            training_tokens_pct=100
            * self._num_training_tokens
            / (self.positions_per_step * self._num_steps),
            mfu_pct=100 * tflops / self.peak_tflops if self.peak_tflops else None,
            tflops=tflops,
            grad_norm=grad_norm.item(),
            learning_rate=rate,
            step_s=step_s,
            peak_gib=peak_gib,
            peak_reserved_gib=reserved_gib,
        )
        if world.rank == 0:
            job.log.step(record)
        if step == 1:
            job.seconds["until first step"] = now - TORCH_IMPORTED_AT
        # The first interval may hold a compilation, so only a generous multiple of a step is a hang.
        self.patience_s = max(
            job.config.collective_timeout_s, 5 * step_s * job.config.logging_frequency
        )
        self._num_steps, self._num_training_tokens = 0, 0.0
        self._clock = now
        if job.config.fail_on_nonfinite and minus_bad > float("-inf"):
            raise FloatingPointError(
                f"the loss of step {-minus_bad:.0f} is not finite; lower --learning-rate, "
                "or go on with --no-fail-on-nonfinite"
            )


class Profiler:
    """A torch.profiler trace of some steps, which are bracketed for nsys as well."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.trace: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Start at the first profiled step."""
        if self.config.profile and step == self.config.profile_step_start:
            self.trace = torch.profiler.profile()
            self.trace.start()
            if self.world.device.type == "cuda":
                torch.cuda.profiler.start()

    def after(self, step: int) -> None:
        """Stop after the last profiled step."""
        if step == self.config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stop and write the trace, if one is being made."""
        if self.trace is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        self.trace.stop()
        self.config.profile_dir.mkdir(parents=True, exist_ok=True)
        path = self.config.profile_dir / f"trace-rank{self.world.rank}.json"
        self.trace.export_chrome_trace(str(path))
        self.trace = None
