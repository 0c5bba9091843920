"""Does one model fit? Tried in a fresh process, so that a failed allocation poisons nothing.

`run_probe` starts a process that builds a model as train.py does, loads it or trains it for two
steps, under a memory limit if asked, and reads how it went from the log of that process. With a
world size it is rank 0 of a simulated world that trains as train_fsdp.py does.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from distributed import EXIT_STATUS, shard, simulated_world, single_world
from job import running_job
from memory import Memory, predict, predict_load
from processes import die_with_parent
from run_log import read_run
from train_config import FSDPTrainConfig, Inputs, TrainConfig, memory_setup, open_inputs
from trainer import build_model, materialize, train

Mode = Literal["load", "train"]
REPOSITORY = Path(__file__).resolve().parent
# Libraries that cannot allocate abort; the kernel kills.
MEMORY_SIGNALS = (-signal.SIGKILL, -signal.SIGABRT, -signal.SIGBUS)
# What the kernel and file mappings may take beside a process's data: the bound stays below.
HOST_RESERVE = 0.05


@dataclass(frozen=True)
class Probe:
    """What is tried: a configuration, how far, on how many (simulated) ranks, within what limit."""

    mode: Mode
    flags: dict[str, Any]
    world_size: int = 1
    limit_bytes: int | None = None

    def config(self) -> TrainConfig:
        """The flags of train.py, or of train_fsdp.py in a simulated world."""
        # A simulated world gathers weights from nobody: its losses are garbage.
        fixed = {"training_steps": 2, "logging_frequency": 2, "num_workers": 0, "digest": False}
        fixed["fail_on_nonfinite"] = self.world_size == 1
        kind = FSDPTrainConfig if self.world_size > 1 else TrainConfig
        return kind(**{**fixed, **self.flags})

    def predicted(self, inputs: Inputs) -> Memory:
        """What the memory model expects of it."""
        setup = memory_setup(self.config(), inputs, num_ranks=self.world_size)
        return predict_load(setup) if self.mode == "load" else predict(setup)


@dataclass(frozen=True)
class Outcome:
    """How a probe went. The peak is not known of one that did not fit."""

    fits: bool
    seconds: float
    peak_gib: float | None = None
    peak_reserved_gib: float | None = None
    reason: str = ""


def run_probe(probe: Probe) -> Outcome:
    """Try it in a fresh process. Raises RuntimeError where that fails for another reason.

    Called from the main thread: the process is killed when the thread that started it ends.
    """
    started = time.perf_counter()
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile("w+", suffix=".out") as log:
        done = subprocess.run(
            [sys.executable, "-c", f"import probe; probe.main({os.getpid()})"],
            input=json.dumps(asdict(probe), default=str), stdout=log, stderr=subprocess.PIPE,
            text=True, env=os.environ | {"WORLD_SIZE": str(probe.world_size), "PYTHONPATH": path},
        )  # fmt: skip
        end = read_run(log.name).end or {}
    seconds = time.perf_counter() - started
    if done.returncode == 0:
        return Outcome(True, seconds, end["peak_gib"], end["peak_reserved_gib"])
    if done.returncode == EXIT_STATUS["out_of_memory"]:
        return Outcome(False, seconds, reason=f"{end['phase']}: {end['reason'].split(';')[0]}")
    if done.returncode in MEMORY_SIGNALS:
        name = signal.Signals(-done.returncode).name
        return Outcome(False, seconds, reason=f"the probe was killed by {name}")
    said = (end.get("reason") or done.stderr.strip() or "it said nothing").splitlines()[-1]
    raise RuntimeError(f"the probe failed with status {done.returncode}: {said}")


def main(parent_pid: int) -> None:
    """The fresh process: read a probe from standard input, and carry it out."""
    die_with_parent(parent_pid)
    probe = Probe(**json.load(sys.stdin))
    config = probe.config()
    inputs = open_inputs(config)
    simulated = probe.world_size > 1
    joined = simulated_world(probe.world_size) if simulated else single_world()
    with joined as world, running_job(config, inputs, world) as job:
        if probe.limit_bytes is not None:
            limit_memory(probe.limit_bytes, world.device)
        with job.phase("build"):
            model = build_model(config, inputs)
            if isinstance(config, FSDPTrainConfig):
                shard(model, world, config.sharding(inputs))
            materialize(model, config, world)
        if probe.mode == "train":
            train(model, job)
        else:
            job.write_end("completed")


def limit_memory(limit_bytes: int, device: torch.device) -> None:
    """Make allocations beyond the limit fail: PyTorch's on a GPU, all of this process on a CPU.

    Libraries map far more than they ever touch (arenas, stacks); what they had mapped before only
    counts as far as it was resident.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    torch.ones(2**20).sum()  # starts the threads of OpenMP, which dies where it cannot
    room = max(0, limit_bytes - process_bytes("VmRSS"))
    limit = process_bytes("VmData") + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def host_bound(root: Path = Path("/")) -> int:
    """Bytes that this process may still take without driving the machine or its cgroup to its end.

    The least of the machine's available memory and what each cgroup above us (version 1 or 2)
    leaves, counting file cache that the kernel can drop; a share stays in reserve.
    """
    bounds = [_bytes_in(root / "proc/meminfo", "MemAvailable")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        folder = mount / path.lstrip("/")
        limits = [_left_in(place) for place in (folder, *folder.parents) if place.is_dir()]
        bounds += [left for left in limits if left is not None]
    return int(min(bounds) * (1 - HOST_RESERVE))


def _left_in(folder: Path) -> int | None:
    """Bytes left in one cgroup, None where it has no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (folder / limit).exists():
            text = (folder / limit).read_text().strip()
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(stat.get(cache, 0))
            return None if text == "max" else max(0, int(text) - used)
    return None


def process_bytes(kind: str) -> int:
    """Memory of this process now: VmRSS, resident, or VmData, what RLIMIT_DATA counts."""
    return _bytes_in(Path("/proc/self/status"), kind)


def _bytes_in(file: Path, name: str) -> int:
    lines = file.read_text().splitlines()
    [size_kib] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(size_kib) * 1024
