"""The job log: what rank 0 prints is what a person tails and what the analysis reads.

    Run: {json}
    Step: 5 | Loss: 11.923412 | Tokens per second: 7774.49 | … | Peak memory (GiB): 54.32
    End: {json}

This module alone knows the format. The reader takes lines with any prefix (timestamps,
``[rank0]:``, ``srun --label`` numbers) and also logs of the earlier implementation: the first six
fields, and the facts of the run in lines of text. What cannot be read is skipped and counted.
"""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, TextIO

SCHEMA_VERSION = 1
KNOWN_KINDS = ("Run", "Probe", "Breakdown", "Checkpoint", "Link", "End")


def _column(name: str, form: str, **default: Any) -> Any:
    """A field of a ``Step:`` line: its name there, and its format."""
    return field(metadata={"name": name, "form": form}, **default)


@dataclass(frozen=True, slots=True)  # a table of runs holds millions
class StepRecord:
    """One ``Step:`` line. Tokens per second and TFLOPs are per GPU; None is printed as n/a."""

    # The first six are all that older logs have.
    step: int = _column("Step", "d")
    loss: float = _column("Loss", ".6f")
    tokens_per_s: float = _column("Tokens per second", ".2f")
    training_tokens_pct: float = _column("Training tokens per second (%)", ".2f")
    mfu_pct: float | None = _column("MFU (%)", ".2f")
    tflops: float | None = _column("TFLOPs", ".2f")
    grad_norm: float | None = _column("Grad norm", ".6f", default=None)
    learning_rate: float | None = _column("Learning rate", ".4e", default=None)
    step_s: float | None = _column("Step time (s)", ".5f", default=None)
    peak_gib: float | None = _column("Peak memory (GiB)", ".3f", default=None)
    peak_reserved_gib: float | None = _column("Peak reserved (GiB)", ".3f", default=None)


_COLUMNS = [(f.name, f.metadata["name"], f.metadata["form"]) for f in fields(StepRecord)]
_NUM_REQUIRED = 6
_FIELD_OF_NAME = {name: attribute for attribute, name, _ in _COLUMNS}
# What a line can begin with, anywhere in it: a job that was requeued may append to half a line.
_BEGIN = re.compile(r"Step: (?=\d)|(?<![A-Za-z])(?P<kind>[A-Za-z]+): (?=\{)")
_CUT = "<cut>"  # written behind half a line, so that its last number is not taken for a whole one
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def format_step(record: StepRecord) -> str:
    """The ``Step:`` line of a record; fields after the sixth that are None are left out."""
    values = [(name, getattr(record, attribute), form) for attribute, name, form in _COLUMNS]
    return " | ".join(
        f"{name}: {'n/a' if value is None else format(value, form)}"
        for place, (name, value, form) in enumerate(values)
        if value is not None or place < _NUM_REQUIRED
    )


def _number(text: str) -> float:
    """A number in JSON. Raises ValueError where it is not finite: we write that as a string."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not finite")
    return int(text) if text.lstrip("-").isdigit() else number


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_number)


def parse_step(text: str, *, cut: bool = False) -> tuple[StepRecord | None, bool]:
    """(record, damaged) of a line from ``Step: `` on.

    A line counts when its first six fields are whole numbers of the right names; a known field
    after them that does not parse, or stands twice, is left out, and the line is damaged, as is
    one that was ``cut``: digits of its last number may be missing. Unknown fields are skipped.
    """
    values: dict[str, Any] = {}
    damaged = cut
    parts = text.rstrip().split(" | ")
    for place, part in enumerate(parts[:-1] if cut else parts):
        name, separator, number = part.partition(": ")
        attribute = _FIELD_OF_NAME.get(name)
        if place < _NUM_REQUIRED and attribute != _COLUMNS[place][0]:
            return None, True
        if attribute is None or attribute in values:
            damaged |= not separator or attribute in values
            continue
        convert = _number if place == 0 else float
        try:
            values[attribute] = None if number == "n/a" else convert(number)
        except ValueError:
            if place < _NUM_REQUIRED:
                return None, True
            damaged = True
    needed = ("loss", "tokens_per_s", "training_tokens_pct")
    if len(values) < _NUM_REQUIRED or None in map(values.get, needed) or values["step"] % 1:
        return None, True
    return StepRecord(**values), damaged


class LogWriter:
    """Writes a job's lines to standard output and, if asked, appends them to a file.

    A terminal is spared the records, which are long, and not for people.
    The file is made at the first line: a job refused before that leaves nothing behind.
    """

    def __init__(self, log_file: Path | None = None) -> None:
        self._path = log_file
        self._file: TextIO | None = None

    def step(self, record: StepRecord) -> None:
        """Write a ``Step:`` line."""
        self.text(format_step(record))

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Write a ``Kind: {json}`` line; numbers that are not finite become strings."""
        text = json.dumps(values, default=str)
        values = json.loads(text, parse_constant=lambda constant: str(float(constant)))
        self.text(f"{kind}: {json.dumps(values)}", shown=not sys.stdout.isatty())

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._file.close()
            self._file = None

    def text(self, line: str, *, shown: bool = True) -> None:
        """Write a line; one for people is skipped by the reader."""
        if self._path is not None:
            try:
                self._append(self._path, line)
            except OSError as error:  # a full disk: training is worth more than this copy
                print(f"{self._path}: {error.strerror}; logging no more to it", file=sys.stderr)
                self._path = None
        try:
            if shown:
                print(line, flush=True)
        except BrokenPipeError:  # whoever read us is gone, and so is everything printed later
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _append(self, path: Path, line: str) -> None:
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            if path.read_bytes()[-1:] not in (b"", b"\n"):  # an earlier job was killed in mid-line
                self._file.write(f"{_CUT}\n")
        self._file.write(line + "\n")
        self._file.flush()


@dataclass
class RunLog:
    """One run as its log tells it; steps in order, the last of a step that stands twice."""

    path: Path
    steps: list[StepRecord] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    probes: list[dict[str, Any]] = field(default_factory=list)
    breakdowns: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    legacy: Any = None  # LegacyFacts of an older log
    num_skipped_lines: int = 0
    num_duplicate_steps: int = 0

    @property
    def run(self) -> dict[str, Any] | None:
        """The ``Run:`` record (of a requeued job: the first), or None in older logs."""
        return self.runs[0] if self.runs else None

    @property
    def status(self) -> str:
        """completed, out_of_memory, preempted or failed; killed: the log has no ``End:``."""
        if self.end is not None:
            return str(self.end.get("status", "failed"))
        told = self.legacy or LegacyFacts()
        if told.out_of_memory:
            return "out_of_memory"
        asked = told.training_steps
        reached = asked and self.steps and self.steps[-1].step >= asked
        return "completed" if reached else "killed"


class UnusableError(ValueError):
    """A log, or another file of evidence, from which nothing can be told; the message names it."""


@contextlib.contextmanager
def blaming(what: object) -> Iterator[None]:
    """Raise UnusableError, which names a file, for all that its damage makes fail in the block."""
    try:
        yield
    except UnusableError:  # the blame is already another's
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise UnusableError(f"{what} cannot be used: {reason}") from error


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
    text = _ANSI.sub("", text)
    # Behind the last newline stands nothing, or a line that was cut anywhere, even in a number.
    *lines, torn = text.replace("\r", "\n").split("\n")
    reader = _Reader(path)
    for line in lines:
        reader.read(line)
    reader.read(torn, cut=True)
    reader.finish_current()
    return reader.finished


class _Reader:
    def __init__(self, path: Path) -> None:
        self.current = RunLog(path)
        self.finished: list[RunLog] = []
        self._steps: dict[int, StepRecord] = {}

    def read(self, line: str, *, cut: bool = False) -> None:
        num_begins = line.count("Step: ") + line.count(": {")  # a regex would take half the time
        if num_begins == 0:
            if not cut and not self.current.runs:
                _read_legacy(line, self.current)
            return
        begin = _BEGIN.search(line)
        while begin:
            if begin["kind"]:
                following = _BEGIN.search(line, self._read_record(begin["kind"], line, begin.end()))
            else:  # two ranks' lines can share one: each ends where the next begins
                following = _BEGIN.search(line, begin.end()) if num_begins > 1 else None
                end = following.start() if following else len(line)
                self._read_step(line[begin.start() : end], cut=cut or following is not None)
            begin = following

    def _read_step(self, text: str, *, cut: bool) -> None:
        step, damaged = parse_step(text, cut=cut)
        self.current.num_skipped_lines += damaged
        if step is not None:
            self.current.num_duplicate_steps += step.step in self._steps
            self._steps[step.step] = step

    def _read_record(self, kind: str, line: str, start: int) -> int:
        """Take in the record whose JSON starts there; return where it ends."""
        try:
            values, end = _DECODER.raw_decode(line, start)
        except (ValueError, RecursionError):
            self.current.num_skipped_lines += kind in KNOWN_KINDS
            return start
        if kind == "Run" or (kind.endswith("Run") and "schema" in values):
            if self.current.runs and not is_same_run(self.current.runs[0], values):
                self.finish_current()
            self.current.runs.append(values)
            self.current.end = None  # an earlier attempt's end is not the job's
        elif kind == "End":
            self.current.end = values
        elif kind in ("Probe", "Breakdown", "Checkpoint", "Link"):
            getattr(self.current, f"{kind.lower()}s").append(values)
        return end

    def finish_current(self) -> None:
        if self.current.runs:
            self.current.legacy = None  # a launcher's words, not those of an older job
        self.current.steps = [self._steps[step] for step in sorted(self._steps)]
        self.finished.append(self.current)
        self.current, self._steps = RunLog(self.current.path), {}


# Flags that may change between the attempts of one job.
_VOLATILE_FLAGS = {"log_file", "resume", "profile", "profile_dir", "collective_timeout_s"}
_VOLATILE_FLAGS |= {"checkpoint_dir", "checkpoint_every", "keep"}
# An attempt that goes on from a checkpoint may also split the global batch over other ranks.
_RESUMED_FLAGS = {"training_steps", "batch_size", "grad_accumulation_steps", "replicas"}
_RESUMED_FLAGS |= {"num_workers"}


def is_same_run(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two ``Run:`` records are attempts of one job: same script, flags, model and data."""
    resumed = second.get("resumed_from_step") is not None
    may_differ = _VOLATILE_FLAGS | (_RESUMED_FLAGS if resumed else set())

    def identity(run: dict[str, Any]) -> list[Any]:
        flags = run.get("config")
        if isinstance(flags, dict):
            flags = {name: flags[name] for name in flags.keys() - may_differ}
        return [flags, *(run.get(key) for key in ("script", "model", "data", "global_batch"))]

    return identity(first) == identity(second)


# What a log of the earlier implementation says of its run, in lines of text.
_LEGACY_FACTS: tuple[tuple[str, str, Any], ...] = (
    ("strategy", r"scaling_strategy=ScalingStrategy\.(\w+), config", str.lower),
    ("factor", r"Loading a model with scale=(\d+)", int),
    ("world_size", r"(?:AVAILABLE GPUS|world size): (\d+)", int),
    ("num_nodes", r"NODES: (\d+)", int),
    ("device", r"GPU 0: (.+?)\s*$", str),
    ("sequence_length", r"[(, ]sequence_length=(\d+)", int),
    ("batch_size", r"[(, ]batch_size=(\d+)", int),
    ("seed", r"set_seed=(\d+)", int),
    ("learning_rate", r"[(, ]learning_rate=(\d+(?:\.\d+)?(?:e-?\d+)?)", float),
    ("training_steps", r"training_steps=(\d+)", int),
    ("model_dtype", r"model_dtype='(\w+)'", str),
    ("vocab_size", r"vocab_size=(\d+)", int),
    ("num_parameters", r"model parameters: (\d[\d,]*)", lambda n: int(n.replace(",", ""))),
    ("compiled", r"[(, ]compile=(True|False)", "True".__eq__),
)
LegacyFacts = make_dataclass(
    "LegacyFacts",
    [*((name, Any, None) for name, _, _ in _LEGACY_FACTS), ("out_of_memory", bool, False)],
)
_LEGACY_PATTERNS = [(name, re.compile(regex), convert) for name, regex, convert in _LEGACY_FACTS]


def _read_legacy(line: str, run: RunLog) -> None:
    facts = run.legacy or LegacyFacts()
    for name, pattern, convert in _LEGACY_PATTERNS:
        match = pattern.search(line)
        # The first word counts: a search loads many models, a failing job prints stack traces.
        if match and getattr(facts, name) is None:
            setattr(facts, name, convert(match[1]))
    if "OutOfMemoryError" in line or "CUDA out of memory" in line:
        facts.out_of_memory = True
    if facts != LegacyFacts():
        run.legacy = facts
