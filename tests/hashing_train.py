"""train.py or train_fsdp.py, noting what it trains on: ``hashing_train.py FOLDER SCRIPT [flags]``.

Appends a line ``step row hash`` for each row of each step taken to a file of its own in FOLDER;
rows are numbered through the global batch, so the lines do not depend on the number of ranks. With
SAVE_DELAY_S in the environment, a save takes that many seconds more.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import resume  # noqa: E402
import step  # noqa: E402
import train  # noqa: E402
import train_fsdp  # noqa: E402
import trainer  # noqa: E402
from trainer import FSDPTrainConfig, TrainConfig, run  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
original_step, original_rate = step.train_step, step.learning_rate
original_save = resume.save
current_step = 0


def noting_rate(config: Any, number: int) -> float:
    """The learning rate, and a note of the step that it is for."""
    global current_step
    current_step = number
    return original_rate(config, number)


def noting_step(model: Any, optimizer: Any, microbatches: Any, **named: Any) -> Any:
    """The step, and a line for each of its rows."""
    results = original_step(model, optimizer, microbatches, **named)
    rows = [pair for batch in microbatches for pair in zip(*batch, strict=True)]
    for row, (tokens, labels) in enumerate(rows, start=RANK * len(rows)):
        digest = hashlib.sha256(tokens.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        NOTES.write(f"{current_step} {row} {digest[:16]}\n")
    NOTES.flush()
    return results


def slow_save(*arguments: Any) -> Path:
    """The save, as on a slow disk."""
    time.sleep(float(os.environ.get("SAVE_DELAY_S", "0")))
    return original_save(*arguments)


folder, script = Path(sys.argv[1]), sys.argv[2]
sys.argv = [str(ROOT / script), *sys.argv[3:]]
folder.mkdir(parents=True, exist_ok=True)
NOTES = open(folder / f"{os.getpid()}.txt", "w")  # noqa: SIM115
step.train_step, trainer.learning_rate = noting_step, noting_rate
resume.save = slow_save
if script == "train.py":
    run(train.main, TrainConfig)
else:
    run(train_fsdp.main, FSDPTrainConfig)
