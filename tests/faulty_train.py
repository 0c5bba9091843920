"""train_fsdp.py (or train.py) with a fault planted: ``faulty_train.py FAULT SCRIPT [flags]``."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import step  # noqa: E402
import train  # noqa: E402
import train_fsdp  # noqa: E402
from model import Transformer  # noqa: E402
from trainer import FSDPTrainConfig, TrainConfig, run  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
original_step = step.train_step
original_forward = Transformer.forward
calls = 0


def faulty_step(*arguments: Any, **named: Any) -> Any:
    """The step, but at the third one the fault happens on the last rank (or on all)."""
    global calls
    calls += 1
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    if calls == 3 and last == RANK:
        if FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if FAULT == "exception":
            raise RuntimeError("planted exception")
        if FAULT == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
    if calls == 3 and FAULT == "nan":
        named["loss_scale"] = float("nan")
    if FAULT == "slow":
        time.sleep(0.2)
    return original_step(*arguments, **named)


def faulty_forward(self: Any, *arguments: Any, **named: Any) -> Any:
    """The forward, but out of memory on the last rank, inside the third step."""
    if calls == 3 and int(os.environ.get("WORLD_SIZE", "1")) - 1 == RANK:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return original_forward(self, *arguments, **named)


FAULT, script = sys.argv[1:3]
sys.argv = [str(ROOT / script), *sys.argv[3:]]
step.train_step = faulty_step
if FAULT == "out_of_memory":
    Transformer.forward = faulty_forward
if script == "train.py":
    run(train.main, TrainConfig)
else:
    run(train_fsdp.main, FSDPTrainConfig)
