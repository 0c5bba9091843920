"""What do the training scripts accept, and is what they were given usable?

The flags of train.py and train_fsdp.py, and every input that they name, opened and checked before
anything is started or written.
"""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from checkpoint import Checkpoint, find_checkpoints
from cli import check_flags
from dataset import Corpus, Tokenizer, build_loader, load_tokenizer, open_corpus
from distributed import Sharding, launched_num_nodes, launched_world_size
from hardware import exchanges_gradients, is_graphed_by_default, nodes_of
from memory import GIB, Setup, describe, full_speed, largest_batch, predict
from model import ActivationCheckpointing, ScalingStrategy, TransformerConfig
from model_config import build_config, count_params, flops_per_token
from processes import lock_folder
from utils import DTYPES, DtypeName

TOKENIZER_PROBE = "Naïve café, 3.14159 and 你好:\n\tdef f(x): return  x**2"


@dataclass(frozen=True)
class ModelFlags:
    """Flags that a training shares with a search: what is trained, on which data."""

    dataset: str = "data/sample.parquet"
    """Parquet file, folder of them, or glob, with a column `text`."""
    tokenizer_name_or_path: str = "tekken"
    """`tekken` (Mistral NeMo, 131,072 tokens), a tokenizer.json or its folder, or a hub id."""
    sequence_length: int = 4096
    """Tokens per row."""
    batch_size: int = 1
    """Rows per rank in one micro-batch."""
    scaling_strategy: ScalingStrategy = "all"
    """Grow width and depth together (`all`) or depth alone (`n_layers`)."""
    model_dtype: DtypeName = "bf16"
    """Dtype of parameters, gradients and optimizer state."""
    compile: bool = field(default_factory=torch.cuda.is_available)
    """Compile each block and the loss with torch.compile (default: on GPUs)."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute in the backward nothing, the gate and up projections (`selective`), or all."""


@dataclass(frozen=True)
class TrainConfig(ModelFlags):
    """Train a Llama-style Transformer on one device, without FSDP."""

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
    scaling_factor: int = 1
    """How far to grow the model, from 1."""
    set_seed: int = 42
    """Seed of the initial weights and of the order of the data."""
    compute_dtype: DtypeName | None = None
    """Dtype of activations and matmuls (default: bf16 on GPUs, fp32 on CPU)."""
    fused_optimizer: bool = True
    """One fused kernel per group of parameters in AdamW."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Replay a step as one CUDA graph; `auto`: where launching its kernels is the limit.

    Under FSDP `auto` does so with compiled blocks, one replica and nothing offloaded."""
    deterministic: bool = False
    """Use only kernels that give the same bits on every run."""
    fail_on_nonfinite: bool = True
    """End the job when a loss is NaN or infinite."""
    digest: bool = True
    """At the end, record random projections of (final - initial) weights."""
    profile: bool = False
    """Write a torch.profiler trace and a `Breakdown:` record (and bracket the steps for nsys)."""
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
    checkpoint_dir: Path | None = None
    """Folder of checkpoints (default: none are written)."""
    checkpoint_every: int = 0
    """Save every n-th step (0: only when asked to stop, and at the end)."""
    keep: int = 2
    """How many checkpoints to keep: the newest whole ones."""
    resume: str = "auto"
    """Go on from the newest whole checkpoint there (`auto`), from none (`never`), or from PATH."""
    collective_timeout_s: float = 45.0
    """A job that makes no progress for this long is ended (until its first step, and while it
    saves: one of whose processes stands still for four times as long)."""
    dry_run: bool = False
    """Print what would be trained and the bytes of its states, then stop."""

    def __post_init__(self) -> None:
        sizes = "sequence_length batch_size grad_accumulation_steps training_steps"
        sizes += " logging_frequency scaling_factor profile_step_start keep"
        check_flags(self, sizes, "be at least 1", lambda value: value >= 1)
        counts = "num_workers lr_warmup_steps set_seed checkpoint_every"
        check_flags(self, counts, "not be negative", lambda value: value >= 0)
        rates, positive = "learning_rate collective_timeout_s", "be greater than 0 and finite"
        check_flags(self, rates, positive, lambda value: 0 < value < math.inf)
        check_flags(self, "peak_tflops", positive, lambda peak: peak is None or 0 < peak < math.inf)
        check_flags(self, "grad_max_norm", positive, lambda value: value > 0)
        check_flags(self, "set_seed", "be below 2^63", lambda seed: seed < 2**63)
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise ValueError("--checkpoint-every needs a --checkpoint-dir to save in")
        if self.profile and self.profile_step_start > self.training_steps:
            raise ValueError("--profile-step-start comes after the last step: nothing to profile")
        if self.profile and self.profile_step_end < self.profile_step_start:
            raise ValueError("--profile-step-end must not come before --profile-step-start")

    @property
    def fsdp(self) -> bool:
        """Whether the model is sharded."""
        return isinstance(self, FSDPTrainConfig)


@dataclass(frozen=True)
class FSDPTrainConfig(TrainConfig):
    """Train a Llama-style Transformer with FSDP2, one rank per device."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host between uses."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward (less memory, one more all-gather)."""
    replicas: int = 1
    """Copies of the model; each is sharded over the ranks of its own (HSDP)."""

    def sharding(self, inputs: "Inputs") -> Sharding:
        """How `shard` is to split the model."""
        return Sharding(
            inputs.compute_dtype,
            self.reshard_after_forward,
            self.cpu_offload,
            memory_setup(self, inputs).exchanged,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        size = launched_world_size()
        must = f"divide the number of ranks ({size})"
        check_flags(self, "replicas", must, lambda replicas: replicas >= 1 and size % replicas == 0)
        if self.cpu_offload and self.cuda_graph == "on":
            raise ValueError("--cuda-graph on is not for --cpu-offload, where the host takes part")


@dataclass(frozen=True)
class Inputs:
    """Everything that a run reads, opened and checked before anything is started or written."""

    corpus: Corpus
    tokenizer: Tokenizer
    model_config: TransformerConfig
    compute_dtype: torch.dtype
    global_batch: int
    flops_per_token: int
    resumable: Sequence[Checkpoint] = ()
    """Checkpoints to go on from, the best first."""


def open_inputs(config: TrainConfig) -> Inputs:
    """Open what the flags name. Raises ValueError, with what to do, for what cannot be used."""
    if config.log_file is not None:
        _check_writable(config.log_file.parent, "--log-file")
        if config.log_file.exists() and not config.log_file.is_file():
            raise ValueError(f"--log-file {config.log_file} is no file")
    if config.profile:
        _check_writable(config.profile_dir, "--profile-dir")
    if config.checkpoint_dir is not None:
        _check_writable(config.checkpoint_dir, "--checkpoint-dir")
    corpus = open_corpus(config.dataset)
    global_batch = launched_world_size() * config.batch_size * config.grad_accumulation_steps
    if corpus.num_documents < global_batch:
        raise ValueError(
            f"{config.dataset} holds {corpus.num_documents} documents, fewer than the "
            f"{global_batch} rows of a global batch; use a smaller --batch-size or more data"
        )
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    probe_data(corpus, tokenizer)
    shape = build_config(config.scaling_strategy, config.scaling_factor, tokenizer.vocab_size)
    compute = config.compute_dtype or ("bf16" if torch.cuda.is_available() else "fp32")
    cost = flops_per_token(shape, config.sequence_length)
    inputs = Inputs(corpus, tokenizer, shape, DTYPES[compute], global_batch, cost)
    folder = config.checkpoint_dir
    if folder is not None and folder.is_dir() and not config.dry_run:
        lock_folder(folder)  # before it is read; a new one is made when nothing was refused
    identity = run_identity(config, inputs)
    resumable = find_checkpoints(folder, config.resume, identity, config.training_steps)
    return replace(inputs, resumable=resumable)


def is_graphed(config: TrainConfig, inputs: Inputs, device_type: str) -> bool:
    """Whether a step is one CUDA graph: asked for, or where launching its kernels is the limit."""
    auto = is_graphed_by_default(
        inputs.flops_per_token * config.batch_size * config.sequence_length,
        fsdp=config.fsdp,
        compiled=config.compile,
        replicas=getattr(config, "replicas", 1),
        cpu_offload=getattr(config, "cpu_offload", False),
    )
    return device_type == "cuda" and {"on": True, "off": False, "auto": auto}[config.cuda_graph]


def run_identity(config: TrainConfig, inputs: Inputs) -> dict[str, Any]:
    """What decides the data and the losses up to rounding: a run goes on only with the same.

    How G is split over ranks, how the model is sharded, and how many steps to train may change.
    """
    flags = "set_seed sequence_length packing model_dtype learning_rate lr_warmup_steps"
    return {
        **{name: getattr(config, name) for name in [*flags.split(), "grad_max_norm"]},
        "compute_dtype": str(inputs.compute_dtype).removeprefix("torch."),
        "global_batch": inputs.global_batch,
        "model": asdict(inputs.model_config),
        "data": inputs.corpus.fingerprint,
        # By what it does: the same file may have another path, and another file the same.
        "tokenizer": [inputs.tokenizer.vocab_size, inputs.tokenizer.encode(TOKENIZER_PROBE)],
    }


def _check_writable(folder: Path, flag: str) -> None:
    """Raise ValueError where a folder can neither be written nor made."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{flag}: {existing} is no folder that can be written")


def probe_data(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Read one row of two tokens, to find text or tokens that are unusable before a job starts.

    Raises ValueError, which says what is wrong.
    """
    loader = build_loader(
        corpus, tokenizer, sequence_length=1, rows=range(1), global_rows=1, seed=0
    )
    with contextlib.closing(loader):
        next(loader)


def memory_setup(config: TrainConfig, inputs: Inputs, num_ranks: int | None = None) -> Setup:
    """What the memory model needs to know of a run (default: on the ranks that were launched)."""
    setup = Setup(
        inputs.model_config, config.sequence_length, config.batch_size,
        config.grad_accumulation_steps, model_bytes=DTYPES[config.model_dtype].itemsize,
        compute_bytes=inputs.compute_dtype.itemsize,
        checkpointing=config.activation_checkpointing, compiled=config.compile,
    )  # fmt: skip
    if not isinstance(config, FSDPTrainConfig):
        return setup
    shards = (num_ranks or launched_world_size()) // config.replicas
    nodes = nodes_of(num_ranks) if num_ranks else launched_num_nodes()
    num_bytes = setup.model_bytes, setup.compute_bytes
    exchanged = exchanges_gradients(
        shards, replicas=config.replicas, nodes=nodes, num_bytes=num_bytes
    )
    return replace(setup, fsdp=True, shards=shards, replicas=config.replicas, exchanged=exchanged,
                   cpu_offload=config.cpu_offload,
                   reshard_after_forward=config.reshard_after_forward)  # fmt: skip


def describe_plan(config: TrainConfig, inputs: Inputs) -> str:
    """Parameters, FLOPs and tokens of a step, and the memory that it needs per rank, as text."""
    shape, setup = inputs.model_config, memory_setup(config, inputs)
    needed, on_gpu = predict(setup), torch.cuda.is_available()
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = torch.cuda.get_device_properties(0).total_memory if on_gpu else host
    place = "this GPU" if on_gpu else "this machine"
    compute_dtype = str(inputs.compute_dtype).removeprefix("torch.")
    rows = {
        "model": f"{config.scaling_strategy} {config.scaling_factor}",
        "dim × layers × heads": f"{shape.dim} × {shape.n_layers} × {shape.n_heads}",
        "dtype of parameters, of computation": f"{config.model_dtype}, {compute_dtype}",
        "compiled": "yes" if config.compile else "no",
        "steps": f"{config.training_steps:,}",
        "parameters": f"{count_params(shape):,}",
        "FLOPs per token": f"{inputs.flops_per_token:,}",
        "tokens per step": f"{inputs.global_batch * config.sequence_length:,}",
        "documents": f"{inputs.corpus.num_documents:,}",
        "": "predicted, per rank",
        **describe(needed),
        f"memory of {place} (GiB)": f"{available / GIB:.2f}",
    }
    for_gpu = on_gpu or (config.compile and inputs.compute_dtype == torch.bfloat16)
    at_full_speed = full_speed(setup)
    if for_gpu:
        rows["at full speed (GiB)"] = f"{at_full_speed / GIB:.2f}"
    if on_gpu:
        most = str(largest_batch(setup, available))
        rows["largest batch size on it at full speed, when empty"] = most
    lines = [f"{name:<50}{value:>20}" for name, value in rows.items()]
    if not for_gpu:
        lines.append("This is a plan for a CPU: for a GPU's add --compute-dtype bf16 --compile")
    host_needed = needed.host * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for wanted, has, where in (
        (needed.total, available, place),
        (host_needed, host, "this machine"),
    ):
        if wanted > has:
            lines.append(
                f"WARNING: {wanted / GIB:.1f} GiB are more than the {has / GIB:.1f} GiB of {where}"
            )
    if on_gpu and needed.total <= available < at_full_speed:
        lines.append("WARNING: it fits, but slowly: gradients leave no room for activations")
    return "\n".join(lines)
