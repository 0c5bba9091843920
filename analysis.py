"""What did each run cost? Many job logs become one table of runs.

Read by the scripts that plot and compare; nothing is taken from a file's name. In logs of the
earlier implementation, only whether a run used FSDP may come from the name of its folder, and
``fsdp_source`` says so. MFU and TFLOPs are computed again from the configuration, since the values
of those logs counted the parameters of one rank's shard; the logged ones stand beside them.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakdown import check_record
from hardware import is_graphed_by_default, peak_tflops
from model_config import TransformerConfig, build_config, count_params, flops_per_token
from run_log import RunLog, StepRecord, UnusableError, read_runs

TRAINING_SCRIPTS = ("train.py", "train_fsdp.py")
SKIP_STEPS = 10  # warm-up: compilation, allocator, clocks
SKIP_STEPS_LEGACY = 1
MFU_TOLERANCE = 0.02  # by which logged and computed MFU may differ before it is said
# Flags that do not change how fast a step is.
_NO_COST = {"training_steps", "learning_rate", "lr_warmup_steps", "grad_max_norm", "set_seed"}
_NO_COST |= {"logging_frequency", "fail_on_nonfinite", "digest", "log_file", "dry_run", "resume"}
_NO_COST |= {"checkpoint_dir", "keep", "profile_dir", "profile_step_start", "profile_step_end"}
_NO_COST |= {"collective_timeout_s"}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NUM_BYTES = {"bf16": 2, "fp32": 4}
ONE_GRAPH, ONE_BY_ONE = "one CUDA graph", "kernels launched one by one"


@dataclass(frozen=True)
class RunFacts:
    """What a run was, apart from how it went. None: the log does not say."""

    strategy: str
    factor: int
    num_parameters: int
    fsdp: bool
    fsdp_source: str  # log, or folder name
    gpus: int
    nodes: int | None
    replicas: int
    batch_size: int  # rows per GPU in one micro-batch
    grad_accumulation_steps: int
    global_batch: int  # rows of all GPUs in one step
    sequence_length: int
    model_dtype: str | None
    compute_dtype: str | None
    activation_checkpointing: str | None
    compiled: bool | None
    launched: str  # how, where not as `--cuda-graph auto` does today
    other_flags: str  # JSON of the flags that cost time and have no field here
    device: str | None
    device_type: str | None  # cuda or cpu
    peak_tflops: float | None  # dense bf16, per GPU
    peak_source: str  # log, device name, logged TFLOPs and MFU, or unknown
    flops_per_token: int
    torch_version: str | None
    commit: str | None
    status: str
    log: str

    def __post_init__(self) -> None:
        for name, kind in RunFacts.__annotations__.items():
            fact = getattr(self, name)
            str(fact).encode()  # raises ValueError for half a character, which no file takes
            if not isinstance(fact, kind) or (type(fact) in (int, float) and not 0 < fact < 1e18):
                raise TypeError(f"{name} is {fact!r}")


@dataclass(frozen=True)
class Metrics:
    """Means over the logged steps after the warm-up, per GPU. None: no steps, or not known."""

    num_steps: int
    first_step: int | None
    last_step: int | None
    tokens_per_s: float | None
    tokens_per_s_median: float | None
    tokens_per_s_p25: float | None
    tokens_per_s_p75: float | None
    training_tokens_pct: float | None
    training_tokens_pct_median: float | None
    training_tokens_pct_p25: float | None
    training_tokens_pct_p75: float | None
    mfu_pct: float | None
    tflops: float | None
    mfu_pct_as_logged: float | None
    tflops_as_logged: float | None
    peak_gib: float | None
    peak_reserved_gib: float | None
    device_memory_gib: float | None  # all that the GPU has


_PEAKS = ("peak_gib", "peak_reserved_gib", "device_memory_gib")
_FACTS = tuple(RunFacts.__dataclass_fields__)
_METRICS = tuple(Metrics.__dataclass_fields__)
_PROVENANCE = ("fsdp_source", "peak_source", "commit", "log")
# Runs that differ in one of these are never pooled.
CONFIGURATION = tuple(name for name in _FACTS if name not in _PROVENANCE)
_ORDER = ["strategy", "fsdp", "gpus", "num_parameters", "log"]
_SAME_FLAGS = ("batch_size", "grad_accumulation_steps", "sequence_length", "model_dtype",
               "activation_checkpointing")  # fmt: skip


def facts(run: RunLog) -> RunFacts:
    """What a run was. Raises ValueError, with the reason, for a log that is not of a training."""
    record = _record(run)
    if record.get("script") not in TRAINING_SCRIPTS:
        raise ValueError(f"it is a log of {record.get('script')}, which does not train")
    try:
        for breakdown in run.breakdowns:
            check_record(breakdown)
        flags, dtype, commit = record["config"], record["compute_dtype"], record["commit"]
        shape = TransformerConfig(**record["model"])
        flops = flops_per_token(shape, flags["sequence_length"])
        peak, peak_source = _peak(run, record)
        own = _NO_COST.union(_FACTS, ("scaling_strategy", "scaling_factor", "compile",
                                     "cuda_graph"))  # fmt: skip
        # What older logs lack is told where it is so.
        if (exchanged := record.get("gradients_exchanged")) not in (True, False, None):
            raise ValueError(f"gradients_exchanged is {exchanged!r}")
        costly = flags | ({"gradients_exchanged": True} if exchanged else {})
        return RunFacts(
            **{name: record[name] for name in ("fsdp", "replicas", "global_batch", "device")},
            **{name: flags[name] for name in _SAME_FLAGS},
            strategy=flags["scaling_strategy"], factor=flags["scaling_factor"],
            num_parameters=count_params(shape), fsdp_source=record.get("fsdp_source", "log"),
            gpus=record["world_size"], nodes=record["num_nodes"],
            device_type=record.get("device_type"), compute_dtype=_DTYPES.get(dtype, dtype),
            compiled=flags["compile"], peak_tflops=peak, peak_source=peak_source,
            launched=_launched(record, flops) if run.run else "",
            other_flags=json.dumps({k: v for k, v in sorted(costly.items()) if k not in own}),
            flops_per_token=flops, torch_version=record["versions"]["torch"], status=run.status,
            log=run.path.as_posix(), commit=commit and commit + "+" * bool(record["dirty"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"a record lacks a field, or has a strange one: {error}") from None


def _launched(record: dict[str, Any], flops_per_token: int) -> str:
    flags, graphed = record["config"], record.get("cuda_graph")
    asked, on_gpu = flags.get("cuda_graph", "off"), record.get("device_type") != "cpu"
    flops = flops_per_token * float(flags["batch_size"]) * float(flags["sequence_length"])
    usual = on_gpu and is_graphed_by_default(
        flops, fsdp=record["fsdp"], compiled=flags["compile"], replicas=record["replicas"],
        cpu_offload=flags.get("cpu_offload", False),
    )  # fmt: skip
    if asked not in ("auto", "on", "off") or graphed not in (True, False, None):
        raise ValueError(f"cuda_graph is {asked!r}, {graphed!r}")
    if graphed is None:  # before logs told, `auto` launched all kernels of FSDP one by one
        auto = asked == "auto" and usual and not record["fsdp"]
        graphed = auto or (asked == "on" and on_gpu)
    return "" if graphed == usual else ONE_GRAPH if graphed else ONE_BY_ONE


def _record(run: RunLog) -> dict[str, Any]:
    """The ``Run:`` record; of an older log one made from its text, None where it is silent."""
    if run.run is not None:
        return run.run
    words = run.legacy
    if words is None:
        raise ValueError("it has no Run: record, nor the facts of a run in words")
    needed = ("strategy", "factor", "vocab_size", "sequence_length", "batch_size", "training_steps")
    lacking = [name for name in needed if getattr(words, name) is None]
    if lacking:
        raise ValueError(f"it does not name its {', '.join(lacking)}: not a log of a training")
    fsdp, source = words.world_size is not None, "log"
    if not fsdp:
        source = f"folder name {run.path.parent.name}"
        if "fsdp" not in source:
            raise ValueError("neither it nor its folder's name says whether it used FSDP")
        fsdp = "no_fsdp" not in source
    gpus = words.world_size or 1
    config = {
        "scaling_strategy": words.strategy, "scaling_factor": words.factor,
        "sequence_length": words.sequence_length, "model_dtype": words.model_dtype,
        "batch_size": words.batch_size, "grad_accumulation_steps": 1,
        "activation_checkpointing": None, "compile": words.compiled,
    }  # fmt: skip
    shape = build_config(words.strategy, words.factor, words.vocab_size)  # pyright: ignore
    return {
        "script": "train_fsdp.py" if fsdp else "train.py", "config": config, "model": asdict(shape),
        "fsdp": fsdp, "fsdp_source": source, "world_size": gpus, "replicas": 1,
        "num_nodes": words.num_nodes if fsdp else 1, "global_batch": gpus * config["batch_size"],
        "device": words.device, "compute_dtype": None, "versions": {"torch": None}, "commit": None,
    }  # fmt: skip


def _peak(run: RunLog, record: dict[str, Any]) -> tuple[float | None, str]:
    """(dense bf16 TFLOP/s, where it is from)."""
    if record.get("peak_tflops"):
        return float(record["peak_tflops"]), "log"
    if record["device"] is not None:
        peak = peak_tflops(record["device"])
        return peak, "device name" if peak else "unknown"
    logged = [(s.tflops, s.mfu_pct) for s in run.steps if s.tflops and s.mfu_pct]
    if not logged:
        return None, "unknown"
    # Each MFU is rounded to 0.01 %; their sum is not, and peaks are whole numbers.
    tflops, mfu_pct = np.sum(logged, axis=0)
    return float(round(100 * tflops / mfu_pct)), "logged TFLOPs and MFU"


def _averaged_steps(run: RunLog, skip_steps: int) -> list[StepRecord]:
    def attempt(record: dict[str, Any]) -> tuple[int, list[Any]]:
        flags = record.get("config") or {}
        shape = [flags.get(name) for name in ("batch_size", "grad_accumulation_steps", "replicas")]
        names = ("world_size", "num_nodes", "cuda_graph", "gradients_exchanged")
        same = [*(record.get(name) or False for name in names), *shape]
        return record.get("resumed_from_step") or 0, same

    attempts = [attempt(record) for record in run.runs] or [(0, [])]
    whole, partly, before = [], [], 0
    for step in run.steps:
        begin, shape = next((one for one in reversed(attempts) if one[0] < step.step), attempts[0])
        if shape == attempts[0][1] and step.step - begin > skip_steps:
            partly.append(step)
            if max(before, begin) - begin >= skip_steps:
                whole.append(step)
        before = step.step
    return whole or partly


def mean_metrics(run: RunLog, *, skip_steps: int | None = None) -> Metrics:
    """Means over the logged steps after ``skip_steps`` (default: 10; of older logs 1).

    Of a resumed run each attempt has its warm-up, and attempts on other ranks or micro-batches than
    the first, or launched otherwise, are left out. So is a line that reaches back into the warm-up
    (it tells of the steps since the line before), unless there is no other.
    MFU and TFLOPs from the configuration are None where the log does not name model and device.
    """
    if skip_steps is None:
        skip_steps = SKIP_STEPS if run.runs else SKIP_STEPS_LEGACY
    steps = _averaged_steps(run, skip_steps)

    def values(name: str) -> list[float]:
        return [value for step in steps if (value := getattr(step, name)) is not None]

    def mean(name: str) -> float | None:
        # Rounded, lest the last bit of a sum decides the last digit that is printed.
        return round(statistics.fmean(found), 6) if (found := values(name)) else None

    def quartiles(name: str) -> dict[str, float | None]:
        found = values(name)
        ends = np.percentile(found, (25, 50, 75)).tolist() if found else (None,) * 3
        return dict(zip((f"{name}_p25", f"{name}_median", f"{name}_p75"), ends, strict=True))

    try:
        what = facts(run)
        flops, peak = what.flops_per_token, what.peak_tflops
    except ValueError:
        flops, peak = None, None
    speed, numbers = mean("tokens_per_s"), [step.step for step in steps]
    tflops = speed * flops / 1e12 if speed is not None and flops else None
    return Metrics(
        num_steps=len(steps), first_step=min(numbers, default=None),
        last_step=max(numbers, default=None), tokens_per_s=speed, **quartiles("tokens_per_s"),
        training_tokens_pct=mean("training_tokens_pct"), **quartiles("training_tokens_pct"),
        mfu_pct=100 * tflops / peak if tflops is not None and peak else None, tflops=tflops,
        mfu_pct_as_logged=mean("mfu_pct"), tflops_as_logged=mean("tflops"),
        **{name: _largest(run, name) for name in _PEAKS},
    )  # fmt: skip


def _largest(run: RunLog, name: str) -> float | None:
    """Largest number of this name in the lines and records of a run; None without any."""
    values = [getattr(step, name, None) for step in run.steps]
    values += [record.get(name) for record in (run.run, run.end) if record]
    return max((float(value) for value in values if isinstance(value, int | float)), default=None)


def find_logs(folder: Path) -> list[Path]:
    """Every job log (``*.out``, ``*.log``) in a folder and the folders in it, in order."""
    found = (path for path in folder.rglob("*") if path.suffix in (".out", ".log"))
    return sorted(path for path in found if path.is_file())  # reading a pipe would not end


def load_runs(folder: Path) -> tuple[list[RunLog], list[tuple[Path, str]]]:
    """(runs, unusable logs with the reason). A run that failed before its first step is a run."""
    runs: list[RunLog] = []
    unusable: list[tuple[Path, str]] = []
    for path in find_logs(folder):
        try:
            for run in read_runs(path):
                facts(run)
                runs.append(run)
        except ValueError as error:
            unusable.append((path, str(error)))
    return runs, unusable


def load_published(folder: Path) -> list[RunLog]:
    """All runs of a folder of evidence, which must not vanish silently.

    Raises ValueError for a log there that cannot be used.
    """
    runs, unusable = load_runs(folder)
    if unusable:
        path, reason = unusable[0]
        raise UnusableError(f"{path} cannot be used: {reason}")
    return runs


def table(runs: Sequence[RunLog], *, skip_steps: int | None = None) -> pd.DataFrame:
    """One row per run: its facts, then its metrics. Raises ValueError as ``facts`` does."""
    rows = [asdict(facts(run)) | asdict(mean_metrics(run, skip_steps=skip_steps)) for run in runs]
    frame = pd.DataFrame(rows, columns=[*_FACTS, *_METRICS])
    # A metric that no run has would make a column of objects.
    frame = frame.astype({name: "float64" for name in _METRICS if name != "num_steps"})
    return frame.sort_values(_ORDER, kind="stable", ignore_index=True)


def pool(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration of a ``table``, with n, the number of runs it was repeated in.

    Metrics are means over the runs; ``tokens_per_s_min`` and ``_max`` are those of single runs.
    Runs with another status (out of memory, killed) are not pooled with completed ones.
    """
    metrics = {name: (name, "mean") for name in _METRICS}
    metrics |= {name: (name, "max") for name in ("last_step", *_PEAKS)}
    metrics |= {"num_steps": ("num_steps", "sum"), "first_step": ("first_step", "min")}
    joined = {name: (name, _join) for name in _PROVENANCE}
    groups = frame.groupby(list(CONFIGURATION), dropna=False, sort=False)
    return groups.agg(
        n=("log", "size"), **metrics, tokens_per_s_min=("tokens_per_s", "min"),
        tokens_per_s_max=("tokens_per_s", "max"), **joined,
    ).reset_index()  # fmt: skip


def _join(values: pd.Series) -> str:
    return ", ".join(dict.fromkeys(values.dropna()))
