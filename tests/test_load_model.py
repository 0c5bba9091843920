"""The search for the largest model: few probes, right answers, bounds, refusals, real training."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import probe
import search as search_room
from memory import GIB
from probe import Outcome, Probe, host_bound, run_probe
from run_log import RunLog, read_run
from search import Device, Search, SearchConfig, search

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --model-dtype fp32"
).split()
TINY_FLAGS: dict[str, Any] = {
    "tokenizer_name_or_path": "tests/data/tokenizer.json",
    "sequence_length": 64,
    "model_dtype": "fp32",
}


def run(script: str, *flags: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, script, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("answer", [0, 1, 2, 7, 13, 19, 20])
@pytest.mark.parametrize("guess", [0, 1, 7, 12, 20, 90])
def test_search_finds_the_answer_from_any_guess(guess: int, answer: int) -> None:
    probes: list[int] = []

    def fits(factor: int) -> bool:
        probes.append(factor)
        return factor <= answer

    assert search(1, 20, guess, fits) == (answer or None)
    assert len(probes) == len(set(probes)) and all(1 <= factor <= 20 for factor in probes)
    assert len(probes) <= 9
    if guess == answer:
        assert len(probes) <= 2
    elif abs(guess - answer) == 1:
        assert len(probes) <= 3


def test_a_search_of_one_factor() -> None:
    assert search(5, 5, 9, lambda factor: True) == 5
    assert search(5, 5, 1, lambda factor: False) is None


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, RunLog]]:
    """One search of each mode within a limit, one that ends at --high, one that --low ends."""
    folder = tmp_path_factory.mktemp("searches")
    flags = {
        "load": "--memory-limit-gib 1.2 --high 12",
        "train": "--memory-limit-gib 1.4 --high 12 --mode train",
        "high": "--memory-limit-gib 3 --high 2",
        "low": "--memory-limit-gib 1.2 --low 5 --high 9",
    }
    found = {}
    for name, words in flags.items():
        log = folder / f"{name}.out"
        code, out, err = run("load_model_no_fsdp.py", *TINY, *words.split(), "--log-file", str(log))
        assert code in (0, 3), err
        assert out == log.read_text()
        found[name] = (code, out, read_run(log))
    return found


@pytest.mark.parametrize("mode", ["load", "train"])
def test_whole_search(searches: Any, mode: str) -> None:
    code, out, log = searches[mode]
    assert code == 0 and log.status == "completed"
    best = log.end["best_factor"]
    tried = {record["factor"]: record for record in log.probes}
    assert tried[best]["fits"] and not tried[best + 1]["fits"]
    assert len(tried) <= 3
    lines = out.splitlines()
    assert lines[-3] == f"Best fit: {best}"
    assert lines[-2] == f"Actual model parameters: {tried[best]['num_parameters']:,}"
    assert log.run["script"] == "load_model_no_fsdp.py" and log.run["config"]["mode"] == mode
    assert str(ROOT) not in out
    for record in log.probes:
        assert record["seconds"] > 0 and record["predicted_gib"] > 0
        assert record["fits"] == (record["peak_gib"] is not None)
        assert record["fits"] or "allocate memory" in record["reason"]
    limit_gib = log.run["config"]["memory_limit_gib"]
    assert tried[best]["peak_gib"] < limit_gib * 1.05
    assert tried[best]["peak_gib"] == pytest.approx(tried[best]["predicted_gib"], rel=0.25)


def test_high_that_still_fits_and_low_that_does_not(searches: Any) -> None:
    code, out, log = searches["high"]
    assert code == 0 and "Best fit: 2" in out and "at least" in log.end["reason"]
    assert len(log.probes) == 1
    code, out, log = searches["low"]
    assert code == 3 and log.status == "out_of_memory" and log.end["best_factor"] is None
    assert "--low 5 does not fit" in out and len(log.probes) == 1


def test_the_answer_really_trains(searches: Any, tmp_path: Path) -> None:
    best = searches["train"][2].end["best_factor"]
    flags = f"--scaling-factor {best} --training-steps 5 --logging-frequency 1".split()
    code, _, err = run("train.py", *TINY, *flags, "--log-file", str(tmp_path / "steps.out"))
    assert code == 0, err
    steps = read_run(tmp_path / "steps.out").steps
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]


BAD_INPUT = {
    "--low 0": "--low must be at least 1",
    "--low 5 --high 4": "--low 5 is above --high 4",
    "--memory-limit-gib 0": "--memory-limit-gib must be greater than 0",
    "--memory-limit-gib 1e300": "--memory-limit-gib must be greater than 0 and finite",
    "--log-file README.md/a": "--log-file: ",
    "--memory-limit-gib nan": "--memory-limit-gib must be greater than 0",
    "--memory-limit-gib 0.001": "do not hold one layer",
    "--memory-limit-gib 1e-300": "do not hold one layer",
    "--scaling-strategy depth": "--scaling-strategy",
    "--mode run": "--mode",
    "--sequence-length 0": "--sequence-length must be at least 1",
    "--tokenizer-name-or-path nowhere.json": "tokenizer",
    "--low 3000 --high 3001 --memory-limit-gib 0.5": "do not hold one layer of `all` 3000",
}


def test_bad_input_ends_with_one_line(tmp_path: Path) -> None:
    log = tmp_path / "never.out"
    for flags, words in BAD_INPUT.items():
        code, out, err = run("load_model_no_fsdp.py", *TINY, "--log-file", str(log), *flags.split())
        assert code == 2 and out == "" and len(err.splitlines()) == 1, (flags, out, err)
        assert words in err, (flags, err)
    assert not log.exists()


def test_dry_run_probes_nothing(tmp_path: Path) -> None:
    flags = ["--memory-limit-gib", "1.2", "--dry-run", "--log-file", str(tmp_path / "never.out")]
    code, out, _ = run("load_model_no_fsdp.py", *TINY, *flags)
    assert code == 0 and "largest factor that should fit" in out and "Probe:" not in out
    assert not (tmp_path / "never.out").exists()


def gpu(**changes: Any) -> Device:
    whole = Device("a GPU", "cuda", total=80 * GIB, free=80 * GIB)
    return dataclasses.replace(whole, **changes)


def test_a_gpu_that_others_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = gpu(free=50 * GIB, taken=30 * GIB)
    monkeypatch.setattr(search_room, "survey_device", lambda: taken)
    with pytest.raises(ValueError, match=r"others have taken 30\.0 of the 80\.0 GiB"):
        Search(SearchConfig(**TINY_FLAGS))
    assert Search(SearchConfig(**TINY_FLAGS, memory_limit_gib=40.0)).bound == 40 * GIB
    monkeypatch.setattr(search_room, "survey_device", lambda: gpu(taken=GIB // 2))
    assert Search(SearchConfig(**TINY_FLAGS)).bound == 80 * GIB


def test_a_crash_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only memory that runs out means that a model does not fit."""
    with pytest.raises(RuntimeError, match="the probe failed with status"):
        run_probe(Probe("load", {"scaling_factor": 1, "sequence_length": 0}))
    log = tmp_path / "search.out"

    def crash(probe: Probe) -> Outcome:
        raise RuntimeError("the probe failed with status 1: planted")

    monkeypatch.setattr(search_room, "run_probe", crash)
    assert Search(SearchConfig(**TINY_FLAGS, high=2, log_file=log)).run() == "failed"
    end = read_run(log).end
    assert end is not None and end["status"] == "failed" and "planted" in end["reason"]


def test_an_interrupted_search_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(probe: Probe) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_room, "run_probe", interrupt)
    log = tmp_path / "search.out"
    assert Search(SearchConfig(**TINY_FLAGS, high=2, log_file=log)).run() == "failed"
    end = read_run(log).end
    assert end is not None and end["reason"] == "interrupted"


def test_a_probe_that_is_killed_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -9, stderr="")
    monkeypatch.setattr(probe.subprocess, "run", lambda *words, **named: killed)
    outcome = run_probe(Probe("load", {}))
    assert not outcome.fits and "SIGKILL" in outcome.reason


def test_a_probe_ends_with_its_search() -> None:
    """kill -9 of the search, while the probe is stopped and could never end by itself."""
    words = [sys.executable, "load_model_no_fsdp.py", *TINY, "--low", "2", "--high", "2"]
    search = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{search.pid}/task/{search.pid}/children")
    deadline = time.monotonic() + 300
    pid = 0
    try:
        while not pid or "Run: {" not in Path(f"/proc/{pid}/fd/1").read_text():
            assert search.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
            # Others than the probe ask git and the processor's name.
            pid = next((int(p) for p in children.read_text().split() if is_probe(int(p))), 0)
        os.kill(pid, signal.SIGSTOP)
        search.kill()
        search.wait()
        deadline = time.monotonic() + 60
        while is_probe(pid):
            assert time.monotonic() < deadline, "the probe outlived its search"
            time.sleep(0.05)
    finally:
        search.kill()
        if is_probe(pid):
            os.kill(pid, signal.SIGKILL)


def is_probe(pid: int) -> bool:
    """Whether a process is a probe that lives (what has ended has no command line)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"import probe" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_a_probe_whose_search_ended_first_does_not_begin() -> None:
    command = [sys.executable, "-c", "import probe; probe.main(1)"]
    done = subprocess.run(
        command, cwd=ROOT, input="no probe", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "has ended" in done.stderr


CGROUPS = {
    "version 2": (
        "0::/job/step",
        {
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": "700",
            "sys/fs/cgroup/job/step/memory.stat": "inactive_file 0",
            "sys/fs/cgroup/job/memory.max": "1000000",
            "sys/fs/cgroup/job/memory.current": "700000",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 100000",
        },
        400_000,
    ),
    "version 1": (
        "4:memory:/job",
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000000",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "900000",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 300000",
        },
        400_000,
    ),
    "none": ("9:name=systemd:/", {}, 2048 * 1024),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_bound_of_the_host(kind: str, tmp_path: Path) -> None:
    line, files, left = CGROUPS[kind]
    files = files | {
        "proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    2048 kB\n",
        "proc/self/cgroup": line + "\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_bound(tmp_path) == int(left * 0.95)


def test_bound_of_this_host() -> None:
    assert 0 < host_bound() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def what_fits(folder: Path, *flags: str) -> tuple[int, str, str]:
    own = "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --high 4"
    figure = ["--figure", str(folder / "figure.png")]
    return run(
        "benchmarks/what_fits.py", *own.split(), "--output-dir", str(folder), *figure, *flags
    )


def test_the_series_runs_and_goes_on(tmp_path: Path) -> None:
    limit = ["--memory-limit-gib", "0.9"]
    for only in ("train_all_full", "steps_all_full", "simulated_4"):
        code, out, err = what_fits(tmp_path, *limit, "--only", only)
        assert code == 0, err
    assert "5 steps, completed" in out
    simulated = read_run(tmp_path / "simulated_4.out")
    assert simulated.run is not None and simulated.run["simulated"]
    assert {record["world_size"] for record in simulated.probes} == {4}
    assert any(record["fits"] and record["simulated"] for record in simulated.probes)
    assert "**simulated**" in out and (tmp_path / "figure.png").stat().st_size > 10_000
    started, logs = time.monotonic(), {path: path.read_text() for path in tmp_path.glob("*.out")}
    code, again, err = what_fits(tmp_path, *limit, "--only", "all_full")
    assert code == 0 and again == out and time.monotonic() - started < 60, err
    assert logs == {path: path.read_text() for path in tmp_path.glob("*.out")}
