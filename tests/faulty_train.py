"""train_fsdp.py (or train.py) with a fault planted: ``faulty_train.py FAULT SCRIPT [flags]``.

Some faults end a job; others leave it running and wrong, and a comparison of the logs must tell.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import distributed  # noqa: E402
import step  # noqa: E402
import train  # noqa: E402
import train_fsdp  # noqa: E402
import trainer  # noqa: E402
from distributed import World  # noqa: E402
from model import Transformer  # noqa: E402
from trainer import FSDPTrainConfig, TrainConfig, run  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
original_step = step.train_step
original_forward = Transformer.forward
original_build_loader = trainer.build_loader
original_build_model = train_fsdp.build_model
calls = 0


def on_last_rank(happens: Callable[[], None]) -> None:
    """Let the fault happen, on the last rank only, and say when."""
    if int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK:
        print(f"fault at {time.time()}", file=sys.stderr, flush=True)
        happens()


def faulty_step(*arguments: Any, **named: Any) -> Any:
    """The step, but at the third one the fault happens on the last rank (or on all)."""
    global calls
    calls += 1
    if calls == 3:
        on_last_rank(AT_A_STEP.get(FAULT, lambda: None))
    if calls == 3 and FAULT == "nan":
        named["loss_scale"] = float("nan")
    microbatches = arguments[2]
    if FAULT == "mean_of_means":
        num_local = sum(int((labels != -100).sum()) for _, labels in microbatches)
        named["loss_scale"] = 1 / (num_local * named["world"].size)
    if FAULT == "scaled_gradient":
        named["loss_scale"] *= named["world"].size
    return original_step(*arguments, **named)


def stopped_build_model(*arguments: Any) -> Any:
    """The model, but the last rank stands still: all of it, when others may take their time."""
    on_last_rank(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    return original_build_model(*arguments)


def faulty_forward(self: Any, *arguments: Any, **named: Any) -> Any:
    """The forward, but out of memory on the last rank, inside the third step."""
    if calls == 3 and int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK:
        if torch.cuda.is_available():
            torch.empty(1 << 45, device="cuda")  # more than any GPU has: raises
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return original_forward(self, *arguments, **named)


def local_norm(self: Any, gradients: Any) -> Any:
    """The norm of one rank's shards, as if it were the whole gradient's."""
    return torch.stack(torch._foreach_norm(list(gradients), 2, torch.float32)).norm()


def load_same_rows(*arguments: Any, rows: range, **named: Any) -> Any:
    """The loader of rank 0, on every rank."""
    return original_build_loader(*arguments, rows=range(len(rows)), **named)


def shard_without_first_layer(model: Any, world: Any, sharding: Any) -> None:
    """Every rank keeps the first block to itself: nobody reduces its gradients."""
    original, alone = distributed.fully_shard, model.blocks[0]

    def fully_shard(module: Any, **named: Any) -> Any:
        if module is model:
            named["ignored_params"] = set(alone.parameters())
        return MagicMock() if module is alone else original(module, **named)

    distributed.fully_shard = fully_shard
    distributed.shard(model, world, sharding)


def fail() -> None:
    """An exception that nobody expects."""
    raise RuntimeError("planted exception")


def ask_twice() -> None:
    """Two signals that ask this process to end."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


AT_A_STEP = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": fail,
    "sigterm": ask_twice,
}
FAULT, script = sys.argv[1:3]
sys.argv = [str(ROOT / script), *sys.argv[3:]]
step.train_step = faulty_step
atexit.register(print, "the interpreter shuts down", file=sys.stderr)
if FAULT == "out_of_memory":
    Transformer.forward = faulty_forward
if FAULT == "stop_early":
    train_fsdp.build_model = stopped_build_model
if FAULT == "local_clipping":
    World.grad_norm = local_norm
if FAULT == "same_rows":
    trainer.build_loader = load_same_rows
if FAULT == "unreduced_layer":
    train_fsdp.shard = shard_without_first_layer
if script == "train.py":
    run(train.main, TrainConfig)
else:
    run(train_fsdp.main, FSDPTrainConfig)
