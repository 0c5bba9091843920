"""How much memory does a training step take per GPU, and what is the largest model that fits?

    python memory.py --gpu-memory-gib 139.8 --gpus 1,2,4,8,16 --scaling-strategy all

From the configuration alone: nothing is allocated, no torch. A peak is the largest of several
moments of a step, since gradients grow while activations go. The formulas follow model.py, loss.py,
step.py and FSDP2's sources (torch/distributed/fsdp/_fully_shard); constants are named below.
"""

import bisect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from cli import parse_flags
from hardware import exchanges_gradients, nodes_of
from model_config import (
    CHUNK_COMPILED,
    CHUNK_EAGER,
    ScalingStrategy,
    TransformerConfig,
    build_config,
    count_block_params,
    count_params,
)

ActivationCheckpointing = Literal["none", "selective", "full"]
GIB = 2**30
MODEL_VOCAB_SIZE = 131_072  # of the default tokenizer
OPTIMIZER_STATES = 2  # AdamW: first and second moment, in the dtype of the parameters
FP32_BYTES = 4
# PyTorch's default cuBLAS workspace on Hopper (at::cuda::getChosenWorkspaceSize).
CUBLAS_BYTES = 32 * 2**20
# Driver, kernels and libraries of one process; nvidia-smi on an idle H200 process: 0.5 to 0.8 GiB.
CONTEXT_BYTES = int(0.8 * GIB)
# Documented defaults of NCCL: 4 MiB a buffer (NCCL_BUFFSIZE), up to 32 channels, both directions.
NCCL_BYTES = 2 * 32 * 4 * 2**20
# Initial weights are drawn in runs of 2^22 numbers in fp32, two of which stand (weights.py).
FILL_BYTES = 2 * FP32_BYTES * 2**22
# Beside what FSDP reserves: with 0.15 GiB a run waited for memory at every step (LOG.md).
SPARE_BYTES = 2**28
# Reserved beyond allocated without FSDP, in the published benchmark: 0.03 to 0.9 % above 20 GiB.
FRAGMENTATION = 0.01


@dataclass(frozen=True)
class Setup:
    """What is trained, and how; bytes are those of one number."""

    config: TransformerConfig
    sequence_length: int
    batch_size: int = 1
    grad_accumulation_steps: int = 1
    model_bytes: int = 2
    compute_bytes: int = 2
    checkpointing: ActivationCheckpointing = "none"
    compiled: bool = True
    fsdp: bool = False
    shards: int = 1
    replicas: int = 1
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    exchanged: bool = False
    """Whether gradients travel in their own dtype (distributed.ExchangeAndSum), not in fp32."""

    @property
    def num_tokens(self) -> int:
        """Positions of one micro-batch of one rank."""
        return self.batch_size * self.sequence_length

    @property
    def casts_weights(self) -> bool:
        """Whether the modules cast their own weights (under FSDP they are gathered cast)."""
        return self.model_bytes != self.compute_bytes and not self.fsdp

    @property
    def reduced_bytes(self) -> int:
        """Bytes of one number of a gradient on its way to the other ranks."""
        return self.compute_bytes if self.exchanged else FP32_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at one moment, by kind."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded_parameters: int = 0
    unsharded_gradients: int = 0
    activations: int = 0
    loss: int = 0
    embedding_gradient: int = 0
    workspace: int = 0
    communication: int = 0
    host: int = 0
    moment: str = ""

    @property
    def allocated(self) -> int:
        """What PyTorch's allocator has allocated."""
        outside = {"communication", "host", "moment"}
        return sum(getattr(self, f.name) for f in fields(self) if f.name not in outside)

    @property
    def reserved(self) -> int:
        """What PyTorch's allocator has taken from the device, fragments included."""
        return int(self.allocated * (1 + FRAGMENTATION))

    @property
    def total(self) -> int:
        """What the device must have: reserved, context and communication."""
        return self.reserved + CONTEXT_BYTES + self.communication


def saved_per_token(setup: Setup, checkpointing: ActivationCheckpointing) -> int:
    """Bytes that one block keeps for its backward, per token.

    Without checkpointing: input of each norm and its output (the input of the projections), query,
    key, value, attention's output and its fp32 log-sum-exp per head; gate, up, their product, and
    op by op silu(gate) too; 1/rms of each norm in fp32. Compiled, the partitioner recomputes only
    what no matmul of the backward reads (is_materialized_backward in torch/_functorch/
    partitioners.py), which is silu(gate). Selective keeps the block's input, what attention
    returns, and the outputs of query, key, value, output and (op by op) down. Full: the input.
    """
    config, width = setup.config, setup.compute_bytes
    dim, heads = config.dim, FP32_BYTES * config.n_heads
    if checkpointing == "full":
        return width * dim
    if checkpointing == "selective":
        return width * ((4 if setup.compiled else 5) * dim + 2 * config.kv_dim) + heads
    num_hidden = 3 if setup.compiled else 4
    numbers = 6 * dim + 2 * config.kv_dim + num_hidden * config.ffn_hidden
    return width * numbers + heads + 2 * FP32_BYTES


def saved_per_block(setup: Setup) -> int:
    """Bytes that one block keeps for its backward; with it the weights that it had to cast.

    Under FSDP the gathered weights have the compute dtype; checkpointing casts again. Compiled, the
    weights of the norms are cast again too.
    """
    saved = setup.num_tokens * saved_per_token(setup, setup.checkpointing)
    if setup.casts_weights and setup.checkpointing == "none":
        norms = 2 * setup.config.dim if setup.compiled else 0
        saved += (count_block_params(setup.config) - norms) * setup.compute_bytes
    return saved


def backward_extra(setup: Setup) -> int:
    """Bytes that the backward of a block needs beside what it kept.

    What checkpointing recomputes, and at the widest place (the product of SwiGLU) three gradients
    of the hidden width for one saved tensor just freed, and two of the model's width.
    """
    config = setup.config
    again = saved_per_token(setup, "none") - saved_per_token(setup, setup.checkpointing)
    flowing = setup.compute_bytes * (2 * config.ffn_hidden + 2 * config.dim)
    return setup.num_tokens * (again + flowing)


def loss_bytes(setup: Setup) -> tuple[int, int]:
    """Bytes of the head's loss at its widest, (forward, backward); see loss.py.

    Forward: logits and their gradient of one chunk (op by op also logits, two exponentials and
    one-hot in fp32), and with several chunks the weight's gradient in fp32, the last chunk's share
    and its logits' gradient. Backward: that gradient, scaled, in the compute dtype. Always the
    normed input and the gradient of it.
    """
    width, vocab = setup.compute_bytes, setup.config.vocab_size
    chunk = min(setup.num_tokens, CHUNK_COMPILED if setup.compiled else CHUNK_EAGER)
    own = width if width != FP32_BYTES else 0  # in fp32 the logits are not copied
    per_logit = 2 * width if setup.compiled else own + 4 * FP32_BYTES
    weight, inputs = vocab * setup.config.dim, 2 * width * setup.num_tokens * setup.config.dim
    forward = chunk * vocab * per_logit
    if chunk < setup.num_tokens:
        forward += weight * (FP32_BYTES + width) + chunk * vocab * width
        scaled = width if setup.compiled else width + FP32_BYTES
        return forward + inputs, weight * (FP32_BYTES + scaled) + inputs
    return forward + inputs, 2 * weight * width + inputs


def moments(setup: Setup) -> list[Memory]:
    """Memory at each moment of a step that can be its peak (from the second step on).

    FSDP2 gathers a group into a buffer and copies it out (one rank copies without a buffer; both
    stand until the next group is gathered), and in the backward gathers the next group ahead. The
    head stays gathered. A block needs most while its feed-forward part is differentiated: only the
    gradient of its down projection is there by then.
    """
    config, layers = setup.config, setup.config.n_layers
    block, ends = count_block_params(config), config.vocab_size * config.dim
    before_end = count_params(config) - ends  # all but the embedding
    width, kept, extra = setup.compute_bytes, saved_per_block(setup), backward_extra(setup)
    full, last = layers * kept, kept + extra
    loss, loss_backward = loss_bytes(setup)
    buffer, down = int(setup.shards > 1), config.dim * config.ffn_hidden
    pair = (1 + buffer) * block  # the block at hand, and the next one in its buffer
    whole = 0 if setup.reshard_after_forward else layers * block + ends
    ahead = block + (ends if whole else buffer * ends)
    waiting = block * setup.reduced_bytes  # the last reduction's buffer, until the next one
    # Without FSDP a gradient counts where it is; with it, once it is reduced.
    here = 0 if setup.fsdp else down
    parts = (
        ("loss", 0, (1 + buffer) * ends + whole, 0, full, loss),
        ("backward of the loss", 0, ends + whole, 0, full, loss_backward),
        ("reduction of the head", 0, whole or block, reduction(setup, ends), full, 0),
        ("last block", ends + here, whole or pair,
         ends * setup.reduced_bytes + down * width, full + extra, 0),
        ("second block", before_end - 2 * block + here, min(whole, 2 * block + ends) or pair,
         waiting + down * width, last + kept, 0),
        ("first block", before_end - block + here, ahead, waiting + down * width, last, 0),
        ("its gradients", before_end - block, ahead, waiting + block * width, 0, 0),
        ("its reduction", before_end - block, ahead - block, reduction(setup, block), 0, 0),
        ("gathered embedding", before_end, ends, waiting + ends * width, 0, 0),
        ("embedding", before_end, 0, reduction(setup, ends, of_own=False), 0,
         embedding_bytes(setup)),
        ("optimizer", count_params(config), 0, 0, 0, 0),
    )  # fmt: skip
    rest = [
        Memory(activations=saved, embedding_gradient=other)
        if name == "embedding"
        else Memory(activations=saved, loss=other)
        for name, *_, saved, other in parts
    ]
    return [_at_moment(setup, *part[:4], own) for part, own in zip(parts, rest, strict=True)]


def reduction(setup: Setup, numel: int, *, of_own: bool = True) -> int:
    """Bytes while FSDP2 reduces the gradients of a group (foreach_reduce).

    They are copied into one buffer (which stands until the next group's reduction), then freed
    (unless they are not its ``of_own``: counted elsewhere); the buffer is reduced into a shard,
    which is cast to the parameters' dtype. The buffer is in fp32, unless they are exchanged: then
    what arrives stands beside what was sent.
    """
    width = setup.reduced_bytes
    shard = width + (setup.model_bytes if setup.model_bytes != width else 0)
    arrived = numel * width if setup.exchanged else 0
    reduced = arrived + numel * shard // setup.shards
    return numel * width + max(numel * setup.compute_bytes * of_own, reduced)


def embedding_bytes(setup: Setup) -> int:
    """Bytes of the embedding's gradient, dense, and of its cast to the parameters' dtype.

    FSDP reduces it after the backward, since no gradient leaves the embedding; it stands meanwhile.
    """
    cast = setup.model_bytes if setup.casts_weights else 0
    return setup.config.vocab_size * setup.config.dim * (setup.compute_bytes + cast)


def _at_moment(
    setup: Setup, name: str, done: int, gathered: int, reducing: int, rest: Memory
) -> Memory:
    """Memory while the gradients of ``done`` parameters stand and ``gathered`` ones are whole.

    With replicas, FSDP2 keeps each fp32 shard to the end of the backward (AllReduceState).
    """
    config, num_params = setup.config, count_params(setup.config)
    ends = config.vocab_size * config.dim
    each = setup.model_bytes / (setup.shards if setup.fsdp else 1)
    if setup.replicas > 1 and setup.model_bytes != FP32_BYTES and name != "optimizer":
        reducing += done * FP32_BYTES // setup.shards
    if setup.grad_accumulation_steps > 1:
        done = num_params
    on_device = 0 if setup.cpu_offload else each
    head = ends * setup.compute_bytes if setup.casts_weights and rest.loss else 0
    return replace(
        rest, moment=name, parameters=int(on_device * num_params), gradients=int(on_device * done),
        optimizer=int(on_device * OPTIMIZER_STATES * num_params),
        unsharded_parameters=gathered * setup.compute_bytes if setup.fsdp else head,
        unsharded_gradients=reducing if setup.fsdp else 0,
        workspace=CUBLAS_BYTES + 2 * FP32_BYTES * setup.sequence_length * config.head_size,
        communication=NCCL_BYTES if setup.shards * setup.replicas > 1 else 0,
        host=int((2 + OPTIMIZER_STATES) * num_params * each) if setup.cpu_offload else 0,
    )  # fmt: skip


def predict(setup: Setup) -> Memory:
    """Memory at the moment of a training step that needs the most."""
    return max(moments(setup), key=lambda memory: memory.allocated)


def reserved_with_room(setup: Setup) -> int:
    """Bytes that PyTorch takes from the device where it has room for them.

    Under FSDP gradients, and what their reduction needs, come from the stream that reduces them,
    and a stream's memory stays its own: the peaks of both parts add up. Where the device has less,
    PyTorch gives memory back and takes it anew at every step, which is slow (LOG.md).
    """
    if not setup.fsdp:
        return predict(setup).reserved
    found = moments(setup)
    gradients = max(m.gradients for m in found) + max(m.unsharded_gradients for m in found)
    return gradients + max(m.allocated - m.gradients - m.unsharded_gradients for m in found)


def full_speed(setup: Setup) -> int:
    """Bytes that the device must have for steps that wait for no memory; ``total`` is the least."""
    least, spare = predict(setup), SPARE_BYTES if setup.fsdp else 0
    return least.total + max(0, reserved_with_room(setup) - least.reserved) + spare


def predict_load(setup: Setup) -> Memory:
    """Memory of the parameters alone, on one device, and of the fp32 run that fills one of them."""
    config = setup.config
    tables = 2 * FP32_BYTES * setup.sequence_length * config.head_size
    parameters = count_params(config) * setup.model_bytes
    return Memory(parameters=parameters, workspace=tables + FILL_BYTES, moment="load")


def largest_factor(fits: Callable[[int], bool]) -> int:
    """Largest scaling factor that fits, 0 where none does."""
    return next(factor for factor in itertools.count() if not fits(factor + 1))


def largest_batch(setup: Setup, available: int) -> int:
    """Most rows of a micro-batch that fit at full speed, 0 where one is too many."""
    rows = range(1, 2**16)
    return bisect.bisect_right(
        rows, available, key=lambda batch: full_speed(replace(setup, batch_size=batch))
    )


def describe(memory: Memory) -> dict[str, str]:
    """Rows of a table: GiB by kind at the peak, what the device must have, and the host."""
    kinds = [f.name for f in fields(memory) if f.name not in ("host", "moment")]
    rows = {f"{name.replace('_', ' ')} (GiB)": getattr(memory, name) for name in kinds}
    rows |= {
        f"peak allocated, at: {memory.moment} (GiB)": memory.allocated,
        "total, fragments and context included (GiB)": memory.total,
        "host memory per rank (GiB)": memory.host,
    }
    return {name: f"{value / GIB:.2f}" for name, value in rows.items() if value}


@dataclass(frozen=True)
class FitConfig:
    """Print the largest model that trains on each number of GPUs (bf16, compiled, AdamW)."""

    gpu_memory_gib: float
    """Memory of one GPU (an H200: 139.8)."""
    gpus: str = "1,2,4,8,16"
    """Numbers of GPUs, comma-separated; with one, no FSDP unless offloaded."""
    host_memory_gib: float = 256.0
    """Memory of the host for each GPU, where offloaded states live."""
    scaling_strategy: ScalingStrategy = "all"
    """Grow width and depth together (`all`) or depth alone (`n_layers`)."""
    sequence_length: int = 4096
    """Tokens per row."""
    batch_size: int = 1
    """Rows per GPU."""

    def __post_init__(self) -> None:
        numbers = self.gpus.split(",")
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"--gpus must be numbers from 1, such as 1,2,4, not {self.gpus}")
        if min(self.sequence_length, self.batch_size) < 1 or not self.host_memory_gib > 0:
            raise ValueError("memory, --sequence-length and --batch-size must be greater than 0")
        if not 0 < self.gpu_memory_gib < 1e6:  # factors that fit are counted up to
            raise ValueError("--gpu-memory-gib must be greater than 0 and below a million")


def setup_of(config: FitConfig, gpus: int, offload: bool, mode: ActivationCheckpointing) -> Setup:
    """What is trained, at factor 1: without FSDP on one GPU, unless offloaded."""
    shape = build_config(config.scaling_strategy, 1, MODEL_VOCAB_SIZE)
    exchanged = exchanges_gradients(gpus, replicas=1, nodes=nodes_of(gpus), num_bytes=(2, 2))
    return Setup(shape, config.sequence_length, config.batch_size, checkpointing=mode,
                 fsdp=gpus > 1 or offload, shards=gpus, cpu_offload=offload,
                 exchanged=exchanged)  # fmt: skip


def largest_of(config: FitConfig, setup: Setup) -> tuple[int, Setup]:
    """(largest factor, what is trained at it); factor 0 where none fits."""

    def at(factor: int) -> Setup:
        return replace(
            setup, config=build_config(config.scaling_strategy, factor, MODEL_VOCAB_SIZE)
        )

    def fits(factor: int) -> bool:
        memory, host_bytes = predict(at(factor)), config.host_memory_gib * GIB
        return memory.total <= config.gpu_memory_gib * GIB and memory.host <= host_bytes

    factor = largest_factor(fits)
    return factor, at(max(factor, 1))


def main(config: FitConfig) -> None:
    """Print a row for each number of GPUs, place of the states and checkpointing mode."""
    print("GPUs  checkpointing  offload  factor         parameters  peak GiB  host GiB per GPU")
    numbers, modes = map(int, config.gpus.split(",")), get_args(ActivationCheckpointing)
    for gpus, offload, mode in itertools.product(numbers, (False, True), modes):
        factor, setup = largest_of(config, setup_of(config, gpus, offload, mode))
        row = f"{gpus:>4}  {mode:<13}  {'yes' if offload else 'no':<7}  {factor or 'none':>6}"
        if factor:
            memory = predict(setup)
            row += f"  {count_params(setup.config):>17,}  {memory.allocated / GIB:>8.1f}"
            row += f"  {memory.host / GIB:>16.1f}"
        print(row)
    print(
        "fits: the peak, 1 % for fragments, context and communication; where fragments are fewer, "
        f"a search may find one factor more. Offload: {config.host_memory_gib:g} GiB of the host a "
        "GPU (--host-memory-gib)",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(parse_flags(FitConfig))
