"""Which is the largest scaling factor that fits a device?

A search starts from the memory model's prediction, never trusts it, and logs each try as a
``Probe:`` record. With a world size its probes are rank 0 of a simulated world under FSDP.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cli import check_flags
from distributed import World, launched_world_size
from job import describe_run
from memory import CONTEXT_BYTES, Memory, describe, largest_factor
from model_config import TransformerConfig, build_config, count_block_params, count_params
from probe import Mode, Outcome, Probe, host_bound, process_bytes, run_probe
from run_log import LogWriter
from train_config import Inputs, ModelFlags, open_inputs
from utils import DTYPES, GIB, device_name

# More than a display takes: somebody computes there.
MAX_TAKEN_BYTES = GIB


@dataclass(frozen=True)
class SearchConfig(ModelFlags):
    """Find the largest model that one device holds without FSDP, or trains."""

    low: int = 1
    """Smallest scaling factor that is tried."""
    high: int = 40
    """Largest scaling factor that is tried."""
    mode: Mode = "load"
    """`load`: the parameters; `train`: two steps, with gradients and optimizer state."""
    memory_limit_gib: float | None = None
    """Bound of PyTorch's memory on a GPU, of the whole process on a CPU (default: what is free)."""
    log_file: Path | None = None
    """Also append the log to this file."""
    dry_run: bool = False
    """Print what the memory model predicts, then stop."""

    def __post_init__(self) -> None:
        check_flags(self, "low", "be at least 1", lambda low: low >= 1)
        if self.low > self.high:
            raise ValueError(f"--low {self.low} is above --high {self.high}")
        check_flags(self, "memory_limit_gib", "be greater than 0 and finite",
                    lambda limit: limit is None or 0 < limit * GIB < math.inf)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """Where the probes run: what they can have (bytes), and how much others have taken."""

    name: str
    kind: Literal["cuda", "cpu"]
    total: int
    free: int
    taken: int = 0


def survey_device() -> Device:
    """The first GPU, or the machine without one. Raises ValueError for a GPU that does not work.

    A GPU is asked in a process of its own: a context would take memory from the probes.
    """
    if not torch.cuda.is_available():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(device_name(torch.device("cpu")), "cpu", total, host_bound())
    code = (
        "import json, torch; free, total = torch.cuda.mem_get_info(0);"
        "print(json.dumps([torch.cuda.get_device_name(0), total, free]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the GPU cannot be used: {done.stderr.strip().splitlines()[-1]}")
    name, total, free_beside_context = json.loads(done.stdout)
    free = min(total, free_beside_context + CONTEXT_BYTES)
    return Device(name, "cuda", total, free, total - free)


def search(low: int, high: int, start: int, fits: Callable[[int], bool]) -> int | None:
    """Largest factor from low to high that fits, None where low does not.

    Begins at ``start``, gallops away from it while the answer is the same, then bisects.
    """
    good, bad = low - 1, high + 1
    strides = iter([1, *(2**n for n in range(high.bit_length() + 1))])
    factor = min(max(start, low), high)
    while bad - good > 1:
        if fits(factor):
            good = factor
        else:
            bad = factor
        if bad > high:
            factor = good + next(strides)
        elif good < low:
            factor = bad - next(strides)
        else:
            factor = (good + bad) // 2
        factor = min(max(factor, good + 1), bad - 1)
    return good if good >= low else None


class Search:
    """One search: its inputs, the bound on memory, and the log."""

    def __init__(self, config: SearchConfig, world_size: int = 1) -> None:
        if launched_world_size() > 1:
            raise ValueError("a search runs on one rank: start it without torchrun")
        self.config, self.world_size = config, world_size
        self.started = time.perf_counter()
        limit_gib = config.memory_limit_gib
        self.limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
        lowest = replace(self.probe(config.low).config(), log_file=config.log_file)
        self.inputs: Inputs = open_inputs(lowest)
        self.shape(config.high)  # raises ValueError where it cannot be built
        self.device: Device = survey_device()
        # Of a CPU's bound the interpreter and its libraries take their part.
        on_gpu = self.device.kind == "cuda"
        self.base_bytes = 0 if on_gpu else process_bytes("VmRSS")
        if not on_gpu:
            self.limit_bytes = self.bound
        self.log = LogWriter(config.log_file)
        self._check_bound()

    def run(self) -> str:
        """Search, write the log, and return the status that its ``End:`` record has."""
        config = self.config
        self.log.record("Run", self.describe())
        try:
            best = search(config.low, config.high, self.guess(), self.fits)
        except (RuntimeError, KeyboardInterrupt) as error:
            return self._end("failed", str(error) or "interrupted", None)
        if best is None:
            reason = f"--low {config.low} does not fit"
            self.log.text(f"Best fit: none ({reason})")
            return self._end("out_of_memory", reason, None)
        self.log.text(f"Best fit: {best}")
        self.log.text(f"Actual model parameters: {count_params(self.shape(best)):,}")
        reason = f"at least: --high {best} still fits" if best == config.high else ""
        if reason:
            self.log.text(f"The answer is {reason}")
        return self._end("completed", reason, best)

    def _end(self, status: str, reason: str, best: int | None) -> str:
        seconds = {"total": round(time.perf_counter() - self.started, 3)}
        fields = {"status": status, "reason": reason, "best_factor": best, "seconds": seconds}
        self.log.record("End", fields)
        self.log.close()
        return status

    def describe(self) -> dict[str, Any]:
        """Fields of the ``Run:`` record: those of a training, but for what a search varies."""
        world = World(torch.device("cpu"))  # asking CUDA would take a context's memory
        record = describe_run(self.probe(self.config.low).config(), self.inputs, world)
        for name in ("num_parameters", "flops_per_token", "model", "tokens_per_step"):
            del record[name]
        names, device = ("mode", "low", "high", "memory_limit_gib"), self.device
        return record | {
            "config": record["config"] | {name: getattr(self.config, name) for name in names},
            "device": device.name, "device_type": device.kind, "device_gib": device.total / GIB,
            "bound_gib": self.bound / GIB, "taken_gib": device.taken / GIB,
            "world_size": self.world_size, "simulated": self.world_size > 1,
        }  # fmt: skip

    def shape(self, factor: int) -> TransformerConfig:
        """Configuration at one factor. Raises ValueError where none can be built."""
        return build_config(self.config.scaling_strategy, factor, self.inputs.tokenizer.vocab_size)

    def probe(self, factor: int) -> Probe:
        """What is tried at one factor."""
        flags = {f.name: getattr(self.config, f.name) for f in fields(ModelFlags)}
        flags["scaling_factor"] = factor
        return Probe(self.config.mode, flags, self.world_size, self.limit_bytes)

    def predicted(self, factor: int) -> Memory:
        """What the memory model expects at one factor."""
        return self.probe(factor).predicted(replace(self.inputs, model_config=self.shape(factor)))

    def needed(self, memory: Memory) -> int:
        """Bytes that the bound must leave: PyTorch's own under a GPU's limit, else all."""
        if self.device.kind == "cpu":
            return memory.allocated + self.base_bytes
        return memory.total if self.limit_bytes is None else memory.reserved

    @property
    def bound(self) -> int:
        """Bytes that a probe can have."""
        free, limit = self.device.free, self.limit_bytes
        return free if limit is None else min(free, limit)

    def guess(self) -> int:
        """Largest factor up to the highest that should fit."""

        def fits(factor: int) -> bool:
            return self.needed(self.predicted(factor)) <= self.bound

        return largest_factor(lambda factor: factor <= self.config.high and fits(factor))

    def fits(self, factor: int) -> bool:
        """Probe one factor and log how it went."""
        predicted, shape = self.predicted(factor), self.shape(factor)
        if sys.stderr.isatty():
            print(f"{self.config.scaling_strategy} {factor}: {count_params(shape):,} parameters,"
                  f" predicted {self._gib(predicted):.1f} GiB …",
                  end="", file=sys.stderr, flush=True)  # fmt: skip
        outcome = run_probe(self.probe(factor))
        if sys.stderr.isatty():
            print(" fits" if outcome.fits else " does not fit", file=sys.stderr)
        self.log.record("Probe", self.record(factor, predicted, outcome))
        return outcome.fits

    def record(self, factor: int, predicted: Memory, outcome: Outcome) -> dict[str, Any]:
        """Fields of a ``Probe:`` record."""
        config, shape = self.config, self.shape(factor)
        return {
            "mode": config.mode, "scaling_strategy": config.scaling_strategy, "factor": factor,
            "num_parameters": count_params(shape), "model": asdict(shape),
            "activation_checkpointing": config.activation_checkpointing, "compile": config.compile,
            "world_size": self.world_size, "simulated": self.world_size > 1,
            "predicted_gib": self._gib(predicted), "predicted_moment": predicted.moment,
            **asdict(outcome),
        }  # fmt: skip

    def _gib(self, memory: Memory) -> float:
        """What the peak of a probe is held against."""
        return (memory.allocated + self.base_bytes) / GIB

    def _check_bound(self) -> None:
        """Raise ValueError where no search makes sense."""
        device, config = self.device, self.config
        if device.taken > MAX_TAKEN_BYTES and self.bound > device.free - MAX_TAKEN_BYTES:
            raise ValueError(
                f"others have taken {device.taken / GIB:.1f} of the {device.total / GIB:.1f} GiB of"
                " this GPU; wait for them, or search below what is free with --memory-limit-gib"
            )
        block = count_block_params(self.shape(config.low)) * DTYPES[config.model_dtype].itemsize
        if self.bound < self.base_bytes + block:
            base = f" beside the {self.base_bytes / GIB:.2f} GiB of the process itself"
            raise ValueError(
                f"{self.bound / GIB:.3g} GiB do not hold one layer of `{config.scaling_strategy}`"
                f" {config.low} ({block / GIB:.3g} GiB){base if self.base_bytes else ''}"
            )

    def plan(self) -> str:
        """The prediction and its memory by kind, as text."""
        factor = self.guess()
        shown = max(factor, self.config.low)
        rows = {
            f"bound on {self.device.name} (GiB)": f"{self.bound / GIB:.2f}",
            "largest factor that should fit": str(factor or "none"),
            "parameters at factor": f"{shown}: {count_params(self.shape(shown)):,}",
            **describe(self.predicted(shown)),
        }
        return "\n".join(f"{name:<44}{value:>20}" for name, value in rows.items())
