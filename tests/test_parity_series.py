"""Does the series make each run once, several at a time, and leave nothing half done?"""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import parity_series
import pytest

from cli import parse_flags
from processes import LOCK_NAME, lock_folder
from run_log import read_run
from train_config import FSDPTrainConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 400
# A series of few steps, called as the script would be; `broken` is a flag that is refused.
SERIES = """
import sys
sys.path.insert(0, "benchmarks")
import parity_series as series
from pathlib import Path
series.WAYS["broken"] = [(1, "--scaling-factor 0")]
series.WAYS["2 to 1 to 2 ranks"] = [
    (2, "--batch-size 4 --training-steps 2"),
    (1, "--batch-size 8 --training-steps 4"),
    (2, "--batch-size 4"),
]
for where, ways in (("one-gpu", ("2 ranks", "broken")), ("two-gpus", ("2 to 1 to 2 ranks",))):
    group = series.Group("few", f"{series.CPU_FLAGS} --training-steps 6", ways)
    series.SERIES[where] = (group,)
sys.exit(series.main(series.SeriesConfig(sys.argv[1], Path(sys.argv[2]), jobs=2)))
"""
# Runs of other programs: NAME=CODE, whose last argument is the log.
RUNS = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
sys.path.insert(0, "benchmarks")
from parity_series import Run, run_all
from pathlib import Path
folder, seconds, *words = sys.argv[1:]
runs = []
for word in words:
    name, code = word.split("=", 1)
    runs.append(Run(Path(folder, f"{name}.out"), [[sys.executable, "-c", code]]))
run_all(runs, num_jobs=2, deadline=time.monotonic() + float(seconds))
"""
WRITE = (
    "import os, sys, time; log = open(sys.argv[2], 'a'); print(os.getpid(), file=log, flush=True); "
)
BEGUN = """print('Run: {"schema": 1, "world_size": 1}', file=log, flush=True); """
DONE = BEGUN + """print('End: {"status": "completed"}', file=log, flush=True); """


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SLOW_S)
    return process.returncode, out, err


def test_every_run_takes_the_same_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that the scripts accept, before an hour of GPUs is spent on them."""
    for group in itertools.chain(*parity_series.SERIES.values()):
        for run in parity_series.runs_of(group, ROOT / "logs"):
            for command in run.commands:
                script = next(word for word in command if word.startswith("train"))
                ranks = (
                    command[command.index("--nproc-per-node") + 1] if script != "train.py" else 1
                )
                monkeypatch.setenv("WORLD_SIZE", str(ranks))
                monkeypatch.setattr(sys, "argv", command[command.index(script) :])
                config = parse_flags(TrainConfig if script == "train.py" else FSDPTrainConfig)
                assert int(ranks) * config.batch_size * config.grad_accumulation_steps == 8
            assert config.training_steps == 30, "the last part of a resumed run"


def test_series_with_a_failed_and_a_resumed_run(tmp_path: Path) -> None:
    code, table, err = finish(start(SERIES, "one-gpu", tmp_path))
    assert code == 1, err
    assert "few_fsdp_broken.out: failed with status 1" in err
    assert "missing: few_fsdp_broken.out" in err
    assert table.count("| equal |") == 1, (table, err)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(times) == 5, "four logs and the lock"
    code, table, err = finish(start(SERIES, "two-gpus", tmp_path))
    assert code == 0, (table, err)
    rows = [line for line in table.splitlines() if "| equal |" in line]
    assert len(rows) == 2 and "resumed: 2 → 1 → 2 ranks" in rows[1], table
    del times[tmp_path / LOCK_NAME]
    assert times == {path: path.stat().st_mtime_ns for path in times}, "one set of references"
    [path] = set(tmp_path.glob("*.out")) - times.keys()
    resumed = read_run(path)
    assert [run["world_size"] for run in resumed.runs] == [2, 1, 2]
    assert [run["resumed_from_step"] for run in resumed.runs] == [None, 2, 4]
    assert [step.step for step in resumed.steps] == [1, 2, 3, 4, 5, 6]


def test_runs_overlap_and_one_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    logs, here = tmp_path / "logs", tmp_path / "here"
    logs.mkdir()
    here.mkdir()
    meet = (
        f"{WRITE} open(f'{here}/{{os.getpid()}}', 'w')\n"
        f"while len(os.listdir('{here}')) < 2: time.sleep(0.05)\n{DONE}"
    )
    runs = [f"a={meet}", f"b={meet}", f"c={WRITE}{DONE}sys.exit(5)", f"d={WRITE}{DONE}"]
    code, _, err = finish(start(RUNS, logs, "60", *runs))
    assert code == 0 and "c.out: failed with status 5" in err
    names = sorted(path.name for path in logs.iterdir())
    assert names == ["a.out", "b.out", "c.unfinished", "d.out"]


def test_no_run_begins_after_the_deadline(tmp_path: Path) -> None:
    assert finish(start(RUNS, tmp_path, "0", f"a={WRITE}"))[0] == 0
    assert list(tmp_path.iterdir()) == []


def start_sleepers(folder: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    """A series whose two runs sleep, and their logs, which hold their process ids."""
    process = start(RUNS, folder, "60", *(f"{name}={WRITE}time.sleep(600)" for name in "ab"))
    logs = [folder / f"{name}.unfinished" for name in "ab"]
    deadline = time.monotonic() + SLOW_S
    while not all(log.exists() and log.read_text().endswith("\n") for log in logs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process, logs


def still_run(logs: list[Path]) -> list[Path]:
    return [log for log in logs if os.path.exists(f"/proc/{log.read_text().strip()}")]


def test_a_signal_ends_all_runs(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process, logs = start_sleepers(tmp_path)
        process.send_signal(number)
        assert finish(process)[0] == 128 + number
        assert not still_run(logs)
        assert not list(tmp_path.glob("*.out"))
        for log in logs:
            log.unlink()


def test_a_series_that_is_killed_leaves_no_run_behind(tmp_path: Path) -> None:
    process, logs = start_sleepers(tmp_path)
    process.kill()
    finish(process)
    deadline = time.monotonic() + SLOW_S
    while left := still_run(logs):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_log_that_is_cut_is_no_evidence(tmp_path: Path) -> None:
    """As a full disk leaves it: the run itself ends well."""
    cut = f"{WRITE}{BEGUN}print('Step: 1 | Lo', file=log)"
    twice, failed = f"{WRITE}{DONE * 2}", f"{WRITE}{DONE.replace('completed', 'preempted')}"
    runs = [f"a={cut}", f"b={twice}", f"c={failed}", "d=0"]
    code, _, err = finish(start(RUNS, tmp_path, "60", *runs))
    assert code == 0
    for name in "abcd":
        assert f"{name}.out: its log is not that of a whole run (see " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}.unfinished" for n in "abc"]


def test_what_counts_as_complete(tmp_path: Path) -> None:
    """As many attempts as the run has commands: an orphan of another series may add one."""
    run = parity_series.Run(tmp_path / "a.out", [["x"]])
    resumed = parity_series.Run(tmp_path / "a.out", [["x"], ["y"]])
    record, end = 'Run: {"world_size": 2}\n', 'End: {"status": "completed"}\n'
    for text, once, twice in (
        (record + end, True, False),
        (record + record + end, False, True),
        (record + end + record + end, False, True),
        (record + end + 'Run: {"world_size": 2, "script": "x"}\n' + end, False, False),
        (record, False, False),
        ("", False, False),
    ):
        run.log.write_text(text)
        assert (run.is_complete, resumed.is_complete) == (once, twice), text


@pytest.mark.parametrize("kind", ["locked", "folder", "pipe", "unfinished folder"])
def test_a_folder_in_a_bad_state_is_refused(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "few_reference_4x2.out"
    if kind == "locked":
        lock_folder(tmp_path)
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        (log if kind == "folder" else log.with_suffix(".unfinished")).mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    code, _, err = finish(start(SERIES, "one-gpu", tmp_path))
    assert code == 2 and len(err.splitlines()) == 1, err
    expected = f"in use by process {os.getpid()}" if kind == "locked" else "is not a regular file"
    assert expected in err
    assert {path.name for path in tmp_path.iterdir()} - {LOCK_NAME} == before - {LOCK_NAME}
