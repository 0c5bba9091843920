"""Who are the other ranks, how is the model sharded over them, and what if one of them fails?

``World(rank=0, size=1)`` makes every collective the identity, so the training loop never asks
whether it runs under FSDP. A watcher thread ends the process when another rank failed or nothing
moves any more: the main thread may be blocked in a collective and cannot notice.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from hardware import nodes_of
from model import Transformer
from utils import configure_allocators

EXIT_STATUS = {"completed": 0, "failed": 1, "out_of_memory": 3, "preempted": 128 + signal.SIGTERM}
# Building the model, the first compilation and a save may take long on one rank.
SLOW_PHASE_S = 1800.0
# torchrun kills what has not ended 30 s after it passed a SIGTERM on.
TERMINATION_GRACE_S = 20.0
LAUNCHER_GRACE_S = 5.0
POLL_S = 0.2
POLLS_PER_SIGN = 5
# A CPU adds the squares of a norm up one after the other, in fp32: of 134 million numbers
# of one size 1.5 % is lost.
NORM_PIECE = 2**12
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Failure:
    """Why a job ended before its last step; what the ``End:`` record says."""

    status: str
    reason: str
    phase: str
    rank: int


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks, and sums over them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    num_nodes: int = 1
    mesh: DeviceMesh | None = field(default=None, compare=False)
    store: dist.Store | None = field(default=None, compare=False)  # None: nobody to watch

    def sum_host(self, values: Sequence[float]) -> list[float]:
        """Sum of numbers over all ranks, in fp64 and through the host: no GPU waits for it."""
        return self._reduce_host(values, dist.ReduceOp.SUM)

    def max_host(self, values: Sequence[float]) -> list[float]:
        """Largest of numbers over all ranks, through the host."""
        return self._reduce_host(values, dist.ReduceOp.MAX)

    def _reduce_host(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, op)
        return total.tolist()

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum a tensor, in place, over the ranks that together hold one copy of the model."""
        if self.mesh is not None and self.mesh["shard"].size() > 1:
            dist.all_reduce(value, group=self.mesh["shard"].get_group())
        return value

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Norm of the whole gradient over all shards: a scalar on the device, in fp32.

        Norms of local shards, squared, summed over the shards, and rooted: equal on all ranks.
        """
        pieces = list(gradients)
        if pieces[0].device.type == "cpu":
            pieces = [piece for g in pieces for piece in g.reshape(-1).split(NORM_PIECE)]
        local_norms = torch.stack(torch._foreach_norm(pieces, 2, torch.float32))
        return self.sum_over_shards(local_norms.square().sum().to(self.device)).sqrt()


def launched_world_size() -> int:
    """Number of ranks that the launcher started (1 without one)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_num_nodes() -> int:
    """Number of nodes that the launcher used; without one, what so many ranks need.

    The same on all ranks, also where nodes have unequal numbers of them.
    """
    return int(os.environ.get("GROUP_WORLD_SIZE") or nodes_of(launched_world_size()))


def pick_device() -> torch.device:
    """This rank's GPU, or the CPU on a machine without GPUs.

    Raises ValueError where the launcher started more ranks on this node than it has GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; "
            "start at most that many ranks on it (--nproc-per-node)"
        )
    configure_allocators()
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)  # before any process group: NCCL takes the current device
    return device


@contextlib.contextmanager
def single_world() -> Iterator[World]:
    """The world of a script that trains without FSDP: one rank, no process group.

    Raises ValueError when a launcher started several ranks.
    """
    if launched_world_size() > 1:
        raise ValueError("this script trains on one rank; use train_fsdp.py for several")
    yield World(device=pick_device())


@contextlib.contextmanager
def sharded_world(replicas: int) -> Iterator[World]:
    """Join the ranks that torchrun started (or be the only one), and leave at the end.

    Tensors of the host travel through gloo, those of GPUs through NCCL.
    """
    device = pick_device()
    rank, size = int(os.environ.get("RANK", "0")), launched_world_size()
    store = _connect(rank, size)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("collectives", store),
        rank=rank,
        world_size=size,
        # The watcher's deadline is the shorter one, and it knows what the job is doing.
        timeout=timedelta(seconds=2 * SLOW_PHASE_S),
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(
        device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
    )
    yield World(device, rank, size, launched_num_nodes(), mesh, _connect(rank, size))
    dist.destroy_process_group()


@contextlib.contextmanager
def simulated_world(size: int) -> Iterator[World]:
    """Rank 0 of a world whose other ranks do not exist: real memory and compute, no communication.

    Collectives of PyTorch's fake process group do nothing, so losses and gradients are wrong.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = pick_device()
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)
    mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("replicate", "shard"))
    yield World(device, 0, size, nodes_of(size), mesh)
    dist.destroy_process_group()


def _connect(rank: int, size: int) -> dist.Store:
    """A connection of its own to the job's key-value store."""
    if "MASTER_ADDR" not in os.environ:  # python train_fsdp.py: nobody to talk to
        if size > 1:
            raise ValueError(
                "WORLD_SIZE is set, but MASTER_ADDR is not: start the ranks by torchrun"
            )
        return dist.HashStore()
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=300)))
    return store


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded: the dtype it computes in, and what is kept where."""

    compute_dtype: torch.dtype
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    exchange_gradients: bool = False


class ExchangeAndSum:
    """A reduce-scatter whose numbers travel as they are, and are added in fp32 where they arrive.

    NCCL adds in the dtype that it sends: gradients in bf16 would have to become fp32, and twice as
    many bytes, first. Every rank sends each of the others its part instead. Between nodes that is
    more than a ring sends, which adds up within a node before.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        """This rank's part of the sum over ranks, rounded once."""
        received = self.exchange(input_tensor, group)
        # PyTorch's sum of bf16 adds up in fp32.
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)

    def exchange(self, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Rank i receives part i of what each rank sends."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received


def shard(model: Transformer, world: World, sharding: Sharding) -> None:
    """Shard a model on the meta device over the world's mesh (FSDP2; HSDP with replicas).

    One group per block, and one each for the embedding and the head: gathered only around their
    use. Gradients are summed in fp32 (`ExchangeAndSum`, or cast). The head is not resharded: its
    backward comes at once.
    """
    assert world.mesh is not None
    # With a mesh of two dimensions FSDP2 keeps every reduced gradient in fp32 to the end of the
    # backward, for an all-reduce over replicas, be it over one (AllReduceState).
    mesh = world.mesh if world.mesh["replicate"].size() > 1 else world.mesh["shard"]
    on_gpu = world.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if sharding.cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=sharding.compute_dtype,
        reduce_dtype=sharding.compute_dtype if sharding.exchange_gradients else torch.float32,
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )

    def wrap(module: nn.Module, reshard: bool) -> None:
        sharded = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            offload_policy=offload,
        )
        # Sums: what a backend makes of an average differs (torch 2.8's gloo: nothing).
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if sharding.exchange_gradients:
            sharded.set_custom_reduce_scatter(ExchangeAndSum())  # pyright: ignore[reportArgumentType]

    wrap(model.embedding, sharding.reshard_after_forward)
    for block in model.blocks:
        wrap(block, sharding.reshard_after_forward)
    wrap(model.head, False)
    wrap(model, False)


class Watch:
    """Knows how the job is doing: signals received, other ranks' failures, time without progress.

    ``write_end`` writes the ``End:`` record (rank 0 only); it is called once, by whichever thread
    learns first how the job ended. ``patience_s``: how long another rank's process may be silent.
    """

    def __init__(
        self, world: World, write_end: Callable[[Failure], None], patience_s: float
    ) -> None:
        self.phase = "start"
        self.stop_requested = False
        self.stop_agreed = False
        self._world = world
        self._write_end = write_end
        self._patience_s = patience_s
        self._signs_seen, self._silent_s = 0, 0.0
        self._store = world.store if world.size > 1 else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._store_lost_at: float | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._terminated_at: float | None = None
        self._last_beat = time.monotonic()
        self._allow_s = SLOW_PHASE_S
        self._wakeup_read, self._wakeup_write = os.pipe()

    def start(self) -> None:
        """Install the signal handlers and start the watcher thread."""
        os.set_blocking(self._wakeup_write, False)
        os.set_blocking(self._wakeup_read, False)
        # The bytes written there reach the watcher even while the main thread is in a collective.
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)
        self._thread.start()

    def beat(self, allow_s: float = SLOW_PHASE_S) -> None:
        """The main thread is alive; the next beat comes within ``allow_s`` or the job is stuck."""
        self._last_beat, self._allow_s = time.monotonic(), allow_s

    def set_phase(self, phase: str) -> None:
        """Name what the main thread does next, for the record of a failure."""
        self.phase = phase

    def end(self, failure: Failure) -> None:
        """End every rank: tell the others, have rank 0 write the record, leave the process."""
        # Another rank's failure may be the cause of ours (a closed connection): it goes first.
        failure = self._posted() or failure
        self._post(failure)
        self._finish(failure)
        time.sleep(60)  # not reached, or the watcher is writing the record and leaves the process

    def close(self) -> None:
        """The job ended well: no later silence or signal is a failure."""
        with self._lock:
            self._ended.set()
        # An interpreter that ends while a thread is inside the store's C++ code aborts.
        self._thread.join()
        signal.set_wakeup_fd(-1)

    def _request_stop(self, number: int, frame: object) -> None:
        self.stop_requested = True

    def _posted(self) -> Failure | None:
        """The failure that a rank has told of; takes note when the store is gone with its host."""
        if self._store is None:
            return None
        try:
            if self._store.check(["failure"]):
                return Failure(**json.loads(self._store.get("failure")))
        except RuntimeError:
            # It goes with the launcher, which ends us too when it ends in order.
            self._store, self._store_lost_at = None, time.monotonic()
        return None

    def _post(self, failure: Failure) -> None:
        if (store := self._store) is not None:
            with contextlib.suppress(RuntimeError):
                store.set("failure", json.dumps(asdict(failure)))

    def _run(self) -> None:
        for poll in itertools.count():
            if self._ended.wait(POLL_S):
                return
            failure = self._posted() or self._stuck()
            if failure is None and poll % POLLS_PER_SIGN == 0:
                failure = self._forsaken()
            if failure is not None and not self._ended.is_set():
                self._finish(failure)

    def _forsaken(self) -> Failure | None:
        """Give a sign of life; a failure when the next rank has given none for too long.

        Its process stands still, or its host: in the slow phases nothing else would tell. A second
        counts only if this rank saw it, which may itself have stood still.
        """
        rank, size = self._world.rank, self._world.size
        if (store := self._store) is None:
            return None
        with contextlib.suppress(RuntimeError):
            store.add(f"signs of {rank}", 1)
            num_signs = store.add(f"signs of {(rank + 1) % size}", 0)
            self._silent_s += POLLS_PER_SIGN * POLL_S
            if num_signs != self._signs_seen:
                self._signs_seen, self._silent_s = num_signs, 0.0
        if self._silent_s < self._patience_s:
            return None
        reason = f"no sign of life for {self._silent_s:.0f} s: was it stopped or killed?"
        failure = Failure("failed", reason, self.phase, (rank + 1) % size)
        self._post(failure)
        return failure

    def _stuck(self) -> Failure | None:
        """A failure when the main thread has been silent for too long."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            # Signals of data loader workers (SIGCHLD) are written there too.
            if set(os.read(self._wakeup_read, 4096)).intersection(STOP_SIGNALS):
                self._terminated_at = self._terminated_at or now
        # Rank 0 first, so that its record is written before the launcher ends everybody.
        patience_s = 3.0 if self._world.rank else 0.0
        if now - self._last_beat > self._allow_s + patience_s:
            reason = f"no progress for {self._allow_s:.0f} s: was a rank stopped or killed?"
            return Failure("failed", reason, self.phase, self._world.rank)
        alone = self._store_lost_at is not None and now - self._store_lost_at > LAUNCHER_GRACE_S
        # The third SIGTERM makes torchrun leave at once; the save after the first may not be done.
        if alone and not (self.stop_requested or self.stop_agreed):
            return Failure("failed", "the launcher is gone", self.phase, self._world.rank)
        if self._terminated_at is not None:
            silent_s = now - max(self._terminated_at, self._last_beat)
            if silent_s > TERMINATION_GRACE_S + patience_s:
                # In a slow phase (building, compiling) no step could end; else a rank is missing.
                status = "preempted" if self._allow_s == SLOW_PHASE_S else "failed"
                reason = "asked to end, and no step ended since"
                reason += ": was a rank killed?" * (status == "failed")
                return Failure(status, reason, self.phase, self._world.rank)
        return None

    def _finish(self, failure: Failure) -> None:
        with self._lock:
            if self._ended.is_set():  # the other thread wrote, and is leaving the process
                return
            self._ended.set()
            if self._world.rank == 0:
                with contextlib.suppress(OSError):  # a full disk must not keep us from leaving
                    self._write_end(failure)
        if (store := self._store) is not None:
            with contextlib.suppress(RuntimeError):
                if self._world.rank == 0:
                    store.set("ended", "yes")
                store.wait(["ended"], timedelta(seconds=5))
            time.sleep(2 * POLL_S)  # the others read the store, which may live in this process
        leave(failure.status)


def leave(status: str) -> NoReturn:
    """End this process, which had a process group, with one of EXIT_STATUS.

    Not by sys.exit: an interpreter that shuts down would wait for collectives that never end, and
    it aborts where one of gloo's threads lets go of the last collective's tensor meanwhile.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_STATUS[status])


def describe_failure(error: BaseException, phase: str, rank: int) -> Failure:
    """Sort an exception: out of memory (on the GPU or the host), or failed."""
    text = " ".join(str(error).split())
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        sign in text
        for sign in (
            "can't allocate memory",
            "CUDA out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "Failed to CUDA calloc",
            "Cuda failure 'out of memory'",
            "Cuda failure 2 'out of memory'",
        )
    )
    if out_of_memory:
        remedy = (
            "try --activation-checkpointing full, a smaller --batch-size or --sequence-length, "
            "a smaller --scaling-factor, or more GPUs"
        )
        return Failure("out_of_memory", f"{text[:300]}; {remedy}", phase, rank)
    # A loss that is not finite, unusable input: the reason says it all.
    if not isinstance(error, FloatingPointError | ValueError):
        traceback.print_exception(error)
    return Failure("failed", f"{type(error).__name__}: {text[:300]}", phase, rank)
