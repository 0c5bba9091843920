"""Does the reader get back what the writer wrote, and nothing else, from logs as they are?"""

import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_log import (
    LegacyFacts,
    LogWriter,
    RunLog,
    StepRecord,
    format_step,
    is_same_run,
    parse_step,
    read_run,
    read_runs,
)

ROOT = Path(__file__).resolve().parent.parent
SEED_LOGS = ROOT.parent / "shared" / "seed_logs"
# Digits that are printed after the point; the learning rate has four in its mantissa.
DECIMALS = {"tokens_per_s": 2, "training_tokens_pct": 2, "mfu_pct": 2, "tflops": 2}
DECIMALS |= {"loss": 6, "grad_norm": 6, "step_s": 5, "peak_gib": 3, "peak_reserved_gib": 3}
RECORD = StepRecord(
    step=5,
    loss=11.923412,
    tokens_per_s=7774.49,
    training_tokens_pct=99.41,
    mfu_pct=40.52,
    tflops=400.71,
    grad_norm=1.204511,
    learning_rate=3e-6,
    step_s=0.5268,
    peak_gib=54.32,
    peak_reserved_gib=60.12,
)
LINE = format_step(RECORD)
RUN_LINE = (
    'Run: {"schema": 1, "script": "train.py", "config": {"batch_size": 1}, "model": {"dim": 256}}'
)
OTHER_RUN_LINE = RUN_LINE.replace('"batch_size": 1', '"batch_size": 2')
END_LINE = 'End: {"status": "completed", "steps_done": 5}'

numbers = st.floats(0, 1e9) | st.sampled_from([math.nan, math.inf])
maybe = st.none() | numbers
step_records = st.builds(
    StepRecord,
    step=st.integers(0, 10**9),
    loss=numbers | st.just(-math.inf),
    tokens_per_s=numbers,
    training_tokens_pct=numbers,
    mfu_pct=maybe,
    tflops=maybe,
    grad_norm=maybe,
    learning_rate=maybe,
    step_s=maybe,
    peak_gib=maybe,
    peak_reserved_gib=maybe,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def as_logged(value: Any) -> Any:
    """What the log keeps of a value: numbers that are not finite stand in it as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, dict):
        return {key: as_logged(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_logged(item) for item in value]
    return value


def rounded(record: StepRecord) -> dict[str, str]:
    """Each field of a record to the digits that the log shows."""
    form = {name: f".{decimals}f" for name, decimals in DECIMALS.items()}
    form |= {"step": "d", "learning_rate": ".4e"}
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {k: "n/a" if v is None else format(v, form[k]) for k, v in values.items()}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., RunLog]:
    """Read a log that holds the given lines (or exactly the given bytes)."""

    def read_lines(*lines: str, raw: bytes | None = None) -> RunLog:
        path = tmp_path / "job.out"
        path.write_bytes("".join(f"{line}\n" for line in lines).encode() if raw is None else raw)
        return read_run(path)

    return read_lines


def steps_of(run: RunLog) -> list[int]:
    return [record.step for record in run.steps]


@given(step_records)
def test_step_survives_to_the_printed_digits(record: StepRecord) -> None:
    parsed, damaged = parse_step(format_step(record))
    assert parsed is not None
    assert not damaged
    assert rounded(parsed) == rounded(record)


def test_step_line_is_the_documented_one() -> None:
    assert LINE == (
        "Step: 5 | Loss: 11.923412 | Tokens per second: 7774.49 | Training tokens per second (%): "
        "99.41 | MFU (%): 40.52 | TFLOPs: 400.71 | Grad norm: 1.204511 | Learning rate: 3.0000e-06"
        " | Step time (s): 0.52680 | Peak memory (GiB): 54.320 | Peak reserved (GiB): 60.120"
    )
    bare = StepRecord(1, 2.0, 3.0, 4.0, mfu_pct=None, tflops=None)
    assert format_step(bare).endswith("MFU (%): n/a | TFLOPs: n/a")


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(step_records, max_size=5, unique_by=lambda record: record.step),
    run=st.dictionaries(st.text(), json_values, max_size=4),
    probe=st.dictionaries(st.text(), json_values, max_size=4),
    end=st.dictionaries(st.text(), json_values, max_size=4),
)
def test_whole_log_survives(
    tmp_path_factory: pytest.TempPathFactory,
    steps: Sequence[StepRecord],
    run: dict[str, Any],
    probe: dict[str, Any],
    end: dict[str, Any],
) -> None:
    path = tmp_path_factory.mktemp("logs") / "made" / "job.out"
    writer = LogWriter(path)
    assert not path.parent.exists()
    writer.record("Run", run)
    writer.record("Probe", probe)
    for record in steps:
        writer.step(record)
    writer.record("End", end)
    writer.close()
    log = read_run(path)
    assert [log.run, log.probes, log.end] == [as_logged(run), [as_logged(probe)], as_logged(end)]
    in_order = sorted(steps, key=lambda record: record.step)
    assert [rounded(s) for s in log.steps] == [rounded(s) for s in in_order]
    assert log.num_skipped_lines == log.num_duplicate_steps == 0


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_any_bytes_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, cut: int
) -> None:
    path = tmp_path_factory.mktemp("logs") / "job.out"
    path.write_bytes(noise + f"\n{LINE}\n".encode() + noise[:cut] + b"\n" + RUN_LINE[:cut].encode())
    assert RECORD in [record for run in read_runs(path) for record in run.steps]


@pytest.mark.parametrize(
    "prefix",
    [
        "2025-05-23 23:20:51,000 - root - INFO - [RANK 0 / 2] ",
        "[rank0]:",
        "[default0]:",
        "0: ",
        " 3%|▎  | 1/30 [00:01<00:29]\r",
        "\x1b[32mINFO\x1b[0m ",
        "\ufeff",
        "\x00\x00",
    ],
)
def test_any_prefix(read: Callable[..., RunLog], prefix: str) -> None:
    run = read(prefix + RUN_LINE, prefix + LINE, prefix + END_LINE)
    assert run.steps == [RECORD]
    assert run.run is not None
    assert run.status == "completed"
    assert run.num_skipped_lines == 0


def test_line_endings_colours_and_bars(read: Callable[..., RunLog]) -> None:
    assert read(raw=f"{RUN_LINE}\r\n{LINE}\r\n".encode()).steps == [RECORD]
    coloured = LINE.replace(": ", ":\x1b[0m ").replace("Step", "\x1b[1;31mStep")
    assert read(coloured).steps == [RECORD]
    bar = read(f"{LINE}\r 50%|███ | 5/10 [00:01<00:01]")
    assert bar.steps == [RECORD]
    assert bar.num_skipped_lines == 0


def test_bytes_that_are_not_text(read: Callable[..., RunLog]) -> None:
    run = read(raw=b"\xff\xfe\n" + LINE.encode() + b"\nStep: 6 | Loss: 1\xff.5 | Tokens per\n")
    assert run.steps == [RECORD]
    assert run.num_skipped_lines == 1


def test_lines_of_two_ranks_in_one(read: Callable[..., RunLog]) -> None:
    other = format_step(replace(RECORD, step=6))
    in_one = read(f"{LINE} [rank1]: {other}")
    assert in_one.steps == [replace(RECORD, peak_reserved_gib=None), replace(RECORD, step=6)]
    assert in_one.num_skipped_lines == 1
    inside = read(LINE[:30] + other, LINE[30:])
    assert steps_of(inside) == [6]
    assert inside.num_skipped_lines == 1
    glued = read(LINE[:-2] + other)  # the first line's last number is cut
    assert glued.steps == [replace(RECORD, peak_reserved_gib=None), replace(RECORD, step=6)]
    assert glued.num_skipped_lines == 1
    with_end = read(f"{LINE} {END_LINE}{other}")
    assert steps_of(with_end) == [5, 6]
    assert with_end.status == "completed"


def test_fields_of_another_line_do_not_overwrite(read: Callable[..., RunLog]) -> None:
    run = read(f"{LINE} | Loss: 3.000000")
    assert run.steps == [RECORD]
    assert run.num_skipped_lines == 1


def test_step_in_the_text_of_a_record_is_none(read: Callable[..., RunLog]) -> None:
    run = read(RUN_LINE, LINE, f'End: {{"status": "failed", "reason": "after {LINE}, Foo: {{"}}')
    assert run.steps == [RECORD]
    assert run.status == "failed"
    assert (run.num_skipped_lines, run.num_duplicate_steps) == (0, 0)


def test_every_cut_of_a_step_line_is_right_or_counted(tmp_path: Path) -> None:
    """A torn line must never give a number with digits missing."""
    path = tmp_path / "job.out"
    whole = {field.name: getattr(RECORD, field.name) for field in fields(RECORD)}
    kept = 0
    for length in range(len("Step: 5"), len(LINE)):
        path.write_text(f"{LINE.replace('Step: 5', 'Step: 4')}\n{LINE[:length]}")
        torn_end = read_run(path)
        writer = LogWriter(path)  # a requeued job appends
        writer.record("Run", {})
        writer.step(replace(RECORD, step=6))
        writer.close()
        appended = read_run(path)
        assert appended.run == {}
        assert steps_of(appended)[-1] == 6
        path.write_text(f"{LINE[:length]}{RUN_LINE}\n")  # Slurm appends without a newline
        glued = read_run(path)
        assert glued.run is not None
        for run in (torn_end, appended, glued):
            assert run.num_skipped_lines == 1
            for record in run.steps:
                values = {field.name: getattr(record, field.name) for field in fields(record)}
                assert all(v in (None, whole[k]) for k, v in values.items() if k != "step")
                kept += record.step == 5
    assert kept > 10  # lines that were cut after the sixth field are worth something


def test_a_terminal_shows_lines_for_people_only(tmp_path: Path) -> None:
    """Lines on a terminal; the file and a pipe have the records too."""
    code = (
        "import sys; from pathlib import Path; from run_log import *\n"
        "log = LogWriter(Path(sys.argv[1]))\n"
        "log.record('Run', {'schema': 1}); log.step(StepRecord(1, 2.0, 3.0, 99.0, None, None))\n"
        "log.text('Best fit: 19'); log.record('End', {'status': 'completed'}); log.close()"
    )
    for name in ("terminal", "pipe"):
        ours, theirs = pty.openpty() if name == "terminal" else os.pipe()
        with open(ours, "rb", buffering=0) as shown:
            path = tmp_path / f"{name}.out"
            command = [sys.executable, "-c", code, str(path)]
            subprocess.run(command, cwd=ROOT, stdout=theirs, check=True, timeout=60)
            lines = shown.read(10_000).decode().replace("\r", "").splitlines()
        os.close(theirs)
        whole = path.read_text().splitlines()
        assert [line.split(":")[0] for line in whole] == ["Run", "Step", "Best fit", "End"]
        assert lines == (whole[1:3] if name == "terminal" else whole)


def test_last_record_without_a_newline_counts(read: Callable[..., RunLog]) -> None:
    assert read(raw=f"{RUN_LINE}\n{LINE}\n{END_LINE}".encode()).status == "completed"
    torn = read(raw=f"{RUN_LINE}\n{LINE}\n{END_LINE[:-1]}".encode())
    assert torn.status == "killed"
    assert torn.num_skipped_lines == 1


def test_order_repeats_and_nan(read: Callable[..., RunLog]) -> None:
    again = replace(RECORD, loss=math.nan)
    run = read(format_step(replace(RECORD, step=7)), LINE, format_step(again))
    assert steps_of(run) == [5, 7]
    assert math.isnan(run.steps[0].loss)
    assert run.num_duplicate_steps == 1


def test_requeued_job_is_one_run(read: Callable[..., RunLog]) -> None:
    later = RUN_LINE.replace('"batch_size": 1', '"batch_size": 1, "resume": true')
    run = read(RUN_LINE, LINE, 'End: {"status": "preempted"}', later)
    assert run.status == "killed"  # the earlier attempt's end is not the job's
    assert len(run.runs) == 2
    run = read(RUN_LINE, LINE, 'End: {"status": "preempted"}', later, LINE, END_LINE)
    assert run.status == "completed"
    assert (len(run.steps), run.num_duplicate_steps) == (1, 1)


def test_words_of_a_launcher_are_no_older_log(read: Callable[..., RunLog]) -> None:
    run = read("GPU 0: NVIDIA H200 (UUID)", "training_steps=5", RUN_LINE, LINE)
    assert run.legacy is None
    assert run.status == "killed"


def test_two_runs_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    path.write_text("\n".join([RUN_LINE, LINE, END_LINE, OTHER_RUN_LINE, LINE, ""]))
    first, second = read_runs(path)
    assert [first.status, second.status] == ["completed", "killed"]
    assert first.steps == second.steps == [RECORD]
    assert second.num_duplicate_steps == 0
    with pytest.raises(ValueError, match="2 different runs"):
        read_run(path)


def test_attempt_that_resumes_may_have_other_ranks(read: Callable[..., RunLog]) -> None:
    """Only from a checkpoint: begun anew with another batch size, it is another run."""
    first = {"script": "train_fsdp.py", "config": {"batch_size": 2}, "global_batch": 4}
    second = first | {"config": {"batch_size": 1, "keep": 2}, "resumed_from_step": 7}
    run = read(f"Run: {json.dumps(first)}", LINE, f"Run: {json.dumps(second)}", LINE)
    assert len(run.runs) == 2 and run.num_duplicate_steps == 1
    assert not is_same_run(first, second | {"resumed_from_step": None})
    assert not is_same_run(first, second | {"global_batch": 8})


def test_unknown_kinds_and_fields(read: Callable[..., RunLog]) -> None:
    run = read('Sweep: {"a": 1}', 'Sweep: {"a": 2}', 'Breakdown: {"idle": 0.5}', f"{LINE} | New: x")
    assert run.breakdowns == [{"idle": 0.5}]
    assert run.steps == [RECORD]
    assert run.num_skipped_lines == 0


@pytest.mark.parametrize(
    "line",
    [
        "Run: {" + '"a": {' * 100_000,
        'Run: {"schema": 1, "config": 3}',
        "Run: {broken",
        "learning_rate=5e-5.1.e-, seed=, NODES: 2.0",
        "Step: 5 of 10",
        'Run: {"schema": 1, "world_size": ' + "9" * 400 + "}",
        'End: {"peak_gib": 1e400, "seconds": NaN}',
        LINE.replace("Step: 5", "Step: " + "9" * 400),
        "Step: 5 | Loss: n/a | Tokens per second: 1.00 | Training tokens per second (%): 1.00"
        " | MFU (%): 1.00 | TFLOPs: 1.00",
    ],
)
def test_nonsense_is_never_fatal(tmp_path: Path, line: str) -> None:
    path = tmp_path / "job.out"
    path.write_text("\n".join([RUN_LINE, line, line, LINE, ""]))
    run = read_runs(path)[-1]
    assert run.steps == [RECORD] and run.end is None


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"hello"])
def test_file_that_is_no_log(read: Callable[..., RunLog], raw: bytes) -> None:
    run = read(raw=raw)
    assert run.steps == []
    assert run.run is None
    assert run.legacy is None
    assert run.status == "killed"


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.out", tmp_path):
        with pytest.raises(ValueError, match="cannot read the log"):
            read_run(path)


def test_writer_prints_and_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.out"
    for step in (1, 2):
        writer = LogWriter(path)
        writer.step(replace(RECORD, step=step))
        writer.close()
    assert steps_of(read_run(path)) == [1, 2]
    assert capsys.readouterr().out == path.read_text()


@pytest.mark.skipif(not SEED_LOGS.is_dir(), reason="the older logs are not public")
def test_older_logs_are_read() -> None:
    paths = sorted(SEED_LOGS.glob("*/*.out"))
    assert len(paths) > 20
    for path in paths:
        run = read_run(path)
        num_lines = path.read_text().count("Step: ")
        assert len(run.steps) + run.num_duplicate_steps == num_lines
        assert run.num_skipped_lines == 0
        assert run.legacy is not None
        assert run.legacy.strategy in ("all", "n_layers")
    runs = {path.name: read_run(path) for path in paths}
    words = {name: run.legacy or LegacyFacts() for name, run in runs.items()}
    assert words["lsai-460981.out"].factor == 10  # published as scale 2
    assert words["lsai-461379.out"].world_size == 2
    assert words["lsai-460955.out"].world_size is None
    assert runs["lsai-461379.out"].status == "completed"
    assert runs["lsai-461015.out"].status == "killed"
    assert runs["lsai-460667.out"].status == "out_of_memory"
