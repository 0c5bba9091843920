"""The job log: what rank 0 prints is what a person tails and what the analysis reads.

    Run: {json}
    Step: 5 | Loss: 11.923412 | Tokens per second: 7774.49 | … | Peak memory (GiB): 54.32
    End: {json}

This module alone knows the format. The reader takes lines with any prefix (timestamps,
``[rank0]:``, ``srun --label`` numbers) and also logs of the earlier implementation: the first six
fields, and the facts of the run in lines of text. What cannot be read is skipped and counted.
"""

import json
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

SCHEMA_VERSION = 1
KNOWN_KINDS = ("Run", "Probe", "Breakdown", "End")


@dataclass(frozen=True)
class StepRecord:
    """One ``Step:`` line. Tokens per second and TFLOPs are per GPU; None is printed as n/a."""

    step: int
    loss: float
    tokens_per_s: float
    training_tokens_pct: float
    mfu_pct: float | None
    tflops: float | None
    grad_norm: float | None = None
    learning_rate: float | None = None
    step_s: float | None = None
    peak_gib: float | None = None
    peak_reserved_gib: float | None = None


# Field, name in the line, format. The first six are all that older logs have.
_COLUMNS = (
    ("step", "Step", "d"),
    ("loss", "Loss", ".6f"),
    ("tokens_per_s", "Tokens per second", ".2f"),
    ("training_tokens_pct", "Training tokens per second (%)", ".2f"),
    ("mfu_pct", "MFU (%)", ".2f"),
    ("tflops", "TFLOPs", ".2f"),
    ("grad_norm", "Grad norm", ".6f"),
    ("learning_rate", "Learning rate", ".4e"),
    ("step_s", "Step time (s)", ".5f"),
    ("peak_gib", "Peak memory (GiB)", ".3f"),
    ("peak_reserved_gib", "Peak reserved (GiB)", ".3f"),
)
_NUM_REQUIRED = 6
_FIELD_OF_NAME = {name: attribute for attribute, name, _ in _COLUMNS}
_STEP = re.compile(r"(?<!\w)Step: (?=\d)")
_RECORD = re.compile(r"(?<!\w)([A-Z][A-Za-z]*): (?=\{)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def format_step(record: StepRecord) -> str:
    """The ``Step:`` line of a record; fields after the sixth that are None are left out."""
    parts = []
    for place, (attribute, name, form) in enumerate(_COLUMNS):
        value = getattr(record, attribute)
        if value is None and place >= _NUM_REQUIRED:
            continue
        parts.append(f"{name}: {'n/a' if value is None else format(value, form)}")
    return " | ".join(parts)


def parse_step(text: str) -> tuple[StepRecord | None, bool]:
    """(record, damaged) of a line from ``Step: `` on.

    A line counts when its first six fields are whole numbers of the right names; a known field
    after them that does not parse is left out, and the line is damaged. Unknown fields are skipped.
    """
    values: dict[str, Any] = {}
    damaged = False
    for place, part in enumerate(text.split(" | ")):
        name, separator, number = part.partition(": ")
        attribute = _FIELD_OF_NAME.get(name)
        if place < _NUM_REQUIRED and attribute != _COLUMNS[place][0]:
            return None, True
        if attribute is None:
            damaged |= not separator
            continue
        try:
            number = number.strip()
            values[attribute] = (
                None if number == "n/a" else int(number) if place == 0 else float(number)
            )
        except ValueError:
            if place < _NUM_REQUIRED:
                return None, True
            damaged = True
    if len(values) < _NUM_REQUIRED:
        return None, True
    if any(values[name] is None for name in ("loss", "tokens_per_s", "training_tokens_pct")):
        return None, True
    return StepRecord(**values), damaged


class LogWriter:
    """Writes a job's lines to standard output and, if asked, appends them to a file.

    The file is made at the first line: a job refused before that leaves nothing behind.
    """

    def __init__(self, log_file: Path | None = None) -> None:
        self._path = log_file
        self._file: TextIO | None = None

    def step(self, record: StepRecord) -> None:
        """Write a ``Step:`` line."""
        self._write(format_step(record))

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Write a ``Kind: {json}`` line; numbers that are not finite become strings."""
        self._write(f"{kind}: {json.dumps(_finite(values), default=str)}")

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: str) -> None:
        print(line, flush=True)
        if self._path is None:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_torn(self._path)
            self._file = self._path.open("a", encoding="utf-8")
            if torn:  # an earlier job was killed in the middle of a line
                self._file.write("\n")
        self._file.write(line + "\n")
        self._file.flush()


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _finite(value: Any) -> Any:
    """The value with nan and infinities as strings, which JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@dataclass
class LegacyFacts:
    """What a log of the earlier implementation says of its run, in lines of text."""

    strategy: str | None = None
    factor: int | None = None
    world_size: int | None = None
    num_nodes: int | None = None
    device: str | None = None
    sequence_length: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    learning_rate: float | None = None
    training_steps: int | None = None
    model_dtype: str | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    out_of_memory: bool = False


@dataclass
class RunLog:
    """One run as its log tells it; steps in order, the last of a step that stands twice."""

    path: Path
    steps: list[StepRecord] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    breakdowns: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    legacy: LegacyFacts | None = None
    num_skipped_lines: int = 0
    num_duplicate_steps: int = 0
    skipped_kinds: Counter[str] = field(default_factory=Counter)

    @property
    def run(self) -> dict[str, Any] | None:
        """The ``Run:`` record (of a requeued job: the first), or None in older logs."""
        return self.runs[0] if self.runs else None

    @property
    def status(self) -> str:
        """completed, out_of_memory, preempted or failed; killed: the log has no ``End:``."""
        if self.end is not None:
            return str(self.end.get("status", "failed"))
        if self.legacy is not None and self.legacy.out_of_memory:
            return "out_of_memory"
        if self.legacy is not None and self.steps:
            reached = self.steps[-1].step >= (self.legacy.training_steps or 0)
            return "completed" if reached else "killed"
        return "killed"


def read_run(path: str | Path) -> RunLog:
    """Read a log that holds one run. Raises ValueError when it holds several, or is no file."""
    runs = read_runs(path)
    if len(runs) > 1:
        raise ValueError(f"{path} holds {len(runs)} different runs; give each a log of its own")
    return runs[0]


def read_runs(path: str | Path) -> list[RunLog]:
    """Read a log: one run (also when a requeued job appended to it), or several different ones.

    Raises ValueError where there is no such file.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read the log {path}: {error.strerror}") from None
    lines = text.split("\n")
    # Behind the last newline stands nothing, or a line that was cut anywhere, even in a number.
    torn = lines.pop()
    reader = _Reader(path)
    for line in lines:
        reader.read(line)
    if _STEP.search(torn) or _RECORD.search(torn):
        reader.current.num_skipped_lines += 1
    return reader.finish()


class _Reader:
    def __init__(self, path: Path) -> None:
        self.current = RunLog(path)
        self.finished: list[RunLog] = []
        self._steps: dict[int, StepRecord] = {}

    def read(self, line: str) -> None:
        if "Step: " not in line and ": {" not in line:
            if not self.current.runs:
                _read_legacy(line, self.current)
            return
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        places = [match.start() for match in _STEP.finditer(line)]
        record = _RECORD.search(line)
        if places:
            self._read_steps(line, places, record.start() if record else len(line))
        if record:
            self._read_record(record[1], line[record.end() :])

    def _read_steps(self, line: str, places: list[int], end: int) -> None:
        # Two ranks' lines can share one: each is read up to where the next begins.
        for start, stop in zip(places, [*places[1:], end], strict=True):
            step, damaged = parse_step(line[start:stop].rstrip())
            self.current.num_skipped_lines += damaged
            if step is not None:
                self.current.num_duplicate_steps += step.step in self._steps
                self._steps[step.step] = step

    def _read_record(self, kind: str, text: str) -> None:
        try:
            values, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            self.current.num_skipped_lines += kind in KNOWN_KINDS
            return
        if kind == "Run":
            if self.current.runs and not is_same_run(self.current.runs[0], values):
                self._finish_current()
            self.current.runs.append(values)
            self.current.end = None  # an earlier attempt's end is not the job's
        elif kind == "End":
            self.current.end = values
        elif kind == "Probe":
            self.current.probes.append(values)
        elif kind == "Breakdown":
            self.current.breakdowns.append(values)
        else:
            self.current.skipped_kinds[kind] += 1

    def _finish_current(self) -> None:
        self.current.steps = [self._steps[step] for step in sorted(self._steps)]
        self.finished.append(self.current)
        self.current, self._steps = RunLog(self.current.path), {}

    def finish(self) -> list[RunLog]:
        self._finish_current()
        return self.finished


# Flags that may change between the attempts of one job.
_VOLATILE_FLAGS = {"log_file", "resume", "profile", "profile_dir", "collective_timeout_s"}


def is_same_run(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two ``Run:`` records are attempts of one job: same script, flags, model and data."""

    def identity(run: dict[str, Any]) -> list[Any]:
        flags = {k: v for k, v in run.get("config", {}).items() if k not in _VOLATILE_FLAGS}
        return [flags, *(run.get(key) for key in ("script", "model", "data", "global_batch"))]

    return identity(first) == identity(second)


_LEGACY_FACTS: tuple[tuple[str, str, Any], ...] = (
    ("strategy", r"scaling_strategy=ScalingStrategy\.(\w+), config", str.lower),
    ("factor", r"Loading a model with scale=(\d+)", int),
    ("world_size", r"(?:AVAILABLE GPUS|world size): (\d+)", int),
    ("num_nodes", r"NODES: (\d+)", int),
    ("device", r"GPU 0: (.+?)\s*$", str),
    ("sequence_length", r"[(, ]sequence_length=(\d+)", int),
    ("batch_size", r"[(, ]batch_size=(\d+)", int),
    ("seed", r"set_seed=(\d+)", int),
    ("learning_rate", r"[(, ]learning_rate=([\d.e-]+)", float),
    ("training_steps", r"training_steps=(\d+)", int),
    ("model_dtype", r"model_dtype='(\w+)'", str),
    ("vocab_size", r"vocab_size=(\d+)", int),
    (
        "num_parameters",
        r"(?:Total|Actual) model parameters: ([\d,]+)",
        lambda n: int(n.replace(",", "")),
    ),
)
_LEGACY_PATTERNS = [(name, re.compile(regex), convert) for name, regex, convert in _LEGACY_FACTS]
_LEGACY_SIGNS = (
    "=",
    "GPU",
    "NODES",
    "world size",
    "model parameters",
    "OutOfMemory",
    "out of memory",
)


def _read_legacy(line: str, run: RunLog) -> None:
    if not any(sign in line for sign in _LEGACY_SIGNS):
        return
    facts = run.legacy or LegacyFacts()
    before = repr(facts)
    for name, pattern, convert in _LEGACY_PATTERNS:
        match = pattern.search(line)
        # The first word counts: a search loads many models, a failing job prints stack traces.
        if match and getattr(facts, name) is None:
            setattr(facts, name, convert(match[1]))
    if "OutOfMemoryError" in line or "CUDA out of memory" in line:
        facts.out_of_memory = True
    if repr(facts) != before:
        run.legacy = facts
