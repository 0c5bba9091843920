"""The launchers, unmodified, on a real Slurm of two nodes that these tests start (tests/slurm/).

On the CPU, with small flags. `make slurm-fixture` installs the packages. Where they cannot run the
tests skip, unless CI_SLURM_REQUIRED is set.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from run_log import RunLog, read_run

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
SMALL = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 32 --model-dtype fp32 "
    "--num-workers 0 --no-digest --learning-rate 1e-3 --lr-warmup-steps 3 --training-steps 6 "
    "--logging-frequency 2"
).split()
ENDLESS = [*SMALL, "--training-steps", "100000"]
FINAL = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL".split()
JOB_TIMEOUT_S = 400.0  # importing torch in eight processes on two busy cores


def needs(reason: str) -> None:
    """Skip, or fail where these tests must run."""
    if os.environ.get("CI_SLURM_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


class Slurm:
    """A running cluster, and a copy of the repository whose logs the jobs write."""

    def __init__(self, folder: Path) -> None:
        self.cluster, self.repo = folder / "cluster", folder / "repo"
        self.cluster.mkdir(mode=0o755)
        for pattern in ("*.py", "sbatch_files/*", "data/*", "tests/data/tokenizer.json"):
            for path in ROOT.glob(pattern):
                target = self.repo / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        (self.repo / ".venv").symlink_to(ROOT / ".venv")
        prolog = folder / "prolog.sh"
        prolog.write_text(
            '#!/bin/bash\necho "print in container ${SLURM_TEST_ENVIRONMENT:-none}"\n'
        )
        prolog.chmod(0o755)
        self.environment = os.environ | {
            "SLURM_CONF": str(self.cluster / "etc" / "slurm.conf"), "RANKS_PER_NODE": "2",
            "SLURM_TASK_PROLOG": str(prolog), "FSDP_VENV": ".venv", "FSDP_COMMIT": "test",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def run(self, *command: str | Path) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            command,
            cwd=self.repo,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, name: str, *options: str) -> str:
        """Submit through submit.sh; the job's id."""
        job = re.search(r"Submitted job (\d+)", self.run("sbatch_files/submit.sh", name, *options))
        assert job
        return job[1]

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job: str) -> Path:
        """The job's log."""
        return Path(self.show(job)["StdOut"])

    def wait(self, job: str, until: Callable[[], bool], timeout_s: float = JOB_TIMEOUT_S) -> None:
        """Wait for a condition, and fail with the job's log when it does not come about."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                text = self.log(job).read_text() if self.log(job).exists() else "no log"
                pytest.fail(f"{self.show(job)}\n{text[-3000:]}")
            time.sleep(0.5)

    def end(self, job: str, timeout_s: float = JOB_TIMEOUT_S) -> str:
        """Wait for a job to end; its final state."""
        self.wait(job, lambda: self.show(job)["JobState"] in FINAL, timeout_s)
        return self.show(job)["JobState"]

    def wait_for_steps(self, job: str, last_step: int = 2) -> None:
        """Wait until a job has logged a step."""

        def logged() -> bool:
            path = self.log(job)
            return path.exists() and any(s.step >= last_step for s in read_run(path).steps)

        self.wait(job, logged)

    def completed(self, job: str) -> RunLog:
        """Wait for a job that must end well; its run."""
        state, text = self.end(job), self.log(job).read_text()
        assert state == "COMPLETED", text[-3000:]
        run = read_run(self.log(job))
        assert run.status == "completed", text[-3000:]
        return run


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """One start for all tests."""
    if os.geteuid():
        needs("a Slurm can only be started by root")
    missing = [name for name in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(name)]
    if missing:
        needs(f"not installed: {', '.join(missing)} (make slurm-fixture)")
    with tempfile.TemporaryDirectory(prefix="fsdp-slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge wants its socket to be reachable by everybody
        slurm = Slurm(folder)
        try:
            slurm.run(CLUSTER, "up", slurm.cluster)
            yield slurm
        finally:
            subprocess.run([CLUSTER, "down", slurm.cluster], capture_output=True, check=False)


def test_two_nodes_in_the_container(slurm: Slurm) -> None:
    """Two ranks on each; the log folder is missing before."""
    assert not (slurm.repo / "logs").exists()
    job = slurm.submit("train_fsdp", "--nodes=2", "--gpus-per-node=2", "--", *SMALL)
    run, text = slurm.completed(job), slurm.log(job).read_text()
    assert run.run is not None and run.run["world_size"] == 4 and run.run["num_nodes"] == 2
    assert run.run["slurm_job_id"] == job
    assert [step.step for step in run.steps] == [1, 2, 4, 6]
    assert run.steps[-1].loss < run.steps[0].loss - 0.2
    assert slurm.log(job) == slurm.repo / "logs" / "train_fsdp" / f"train_fsdp-{job}.out"
    assert "Hosts: nid001 nid002\n" in text and text.count("GPUs seen") == 2
    assert text.count("in container ngc_pt_jan") == 2
    assert re.search(rf"^Job {job} .* begins 2.*^Job {job} ends 2.* status 0$", text, re.M | re.S)
    assert "NCCL transport" in text


def test_one_process_without_the_container_plugin(slurm: Slurm) -> None:
    """Also: a flag that is refused fails the job before anything is loaded."""
    slurm.run(CLUSTER, "plugin", slurm.cluster, "off")
    try:
        jobs = [slurm.submit("train_no_fsdp", "--", *SMALL),
                slurm.submit("train_no_fsdp", "--", "--batch-size", "0")]  # fmt: skip
        run = slurm.completed(jobs[0])
        assert run.run is not None and run.run["script"] == "train.py"
        assert "in container none" in slurm.log(jobs[0]).read_text()
        assert slurm.end(jobs[1]) == "FAILED" and slurm.show(jobs[1])["ExitCode"] == "2:0"
        text = slurm.log(jobs[1]).read_text()
        assert "train.py: error: --batch-size must be at least 1" in text and "Run: {" not in text
    finally:
        slurm.run(CLUSTER, "plugin", slurm.cluster, "on")


def test_batch_script_in_the_container(slurm: Slurm) -> None:
    """What `#SBATCH --environment=...` does: the launcher itself runs inside, and still submits."""
    job = slurm.submit("train_no_fsdp", "--environment=mine", "--", *SMALL)
    slurm.completed(job)


def worker_pids(job: str) -> list[int]:
    """Processes of this machine that are ranks of a job."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        if {f"SLURM_JOB_ID={job}".encode(), b"LOCAL_RANK=1"} <= set(environment):
            pids.append(int(path.parent.name))
    return pids


def test_killed_worker_fails_the_job_within_a_minute(slurm: Slurm) -> None:
    job = slurm.submit("train_fsdp", "--gpus-per-node=2", "--requeue", "--", *ENDLESS)
    slurm.wait_for_steps(job)
    pids = worker_pids(job)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert slurm.end(job, timeout_s=60) == "FAILED"
    assert slurm.show(job)["Restarts"] == "0", "only a signal asks for a requeue"


def test_cancelled_job_is_not_requeued(slurm: Slurm) -> None:
    job = slurm.submit("train_fsdp", "--gpus-per-node=2", "--requeue", "--", *ENDLESS)
    slurm.wait_for_steps(job)
    slurm.run("scancel", job)
    assert slurm.end(job) == "CANCELLED"
    assert read_run(slurm.log(job)).status == "preempted"
    time.sleep(10)  # a requeued job would be pending again
    assert slurm.show(job)["JobState"] == "CANCELLED" and slurm.show(job)["Restarts"] == "0"


def preempt(slurm: Slurm, job: str) -> None:
    """Send what --signal=B:USR1@300 sends, twice, and wait for the job to run again."""
    restarts = int(slurm.show(job)["Restarts"])
    for _ in range(2):
        slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait(job, lambda: int(slurm.show(job)["Restarts"]) > restarts)


@pytest.mark.long
def test_restarts_without_progress_come_to_an_end(slurm: Slurm) -> None:
    """Without checkpoints each attempt begins anew; none gets further than the long first one."""
    job = slurm.submit("train_no_fsdp", "--requeue", "--", *ENDLESS)
    slurm.wait_for_steps(job, last_step=200)
    for restart in range(3):
        preempt(slurm, job)
        slurm.wait(job, lambda n=restart + 2: slurm.log(job).read_text().count("Step: 1 |") == n)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    assert slurm.end(job) == "FAILED" and slurm.show(job)["Restarts"] == "3"
    assert "Not requeued: 3 restarts" in slurm.log(job).read_text()


def trace(run: RunLog) -> list[tuple[int, float, float | None]]:
    return [(step.step, step.loss, step.grad_norm) for step in run.steps]


def requeued_flags(num_steps: int) -> list[str]:
    return [*SMALL, "--training-steps", str(num_steps), "--deterministic",
            "--logging-frequency", "1", "--checkpoint-every", "10", "--keep", "2"]  # fmt: skip


def check_requeued(slurm: Slurm, job: str, num_steps: int, undisturbed: RunLog) -> None:
    """One run, in one log, and the trace of a run that nobody disturbed."""
    run = slurm.completed(job)
    assert len(run.runs) >= 2, "it was requeued"
    assert trace(run) == trace(undisturbed) and len(run.steps) == num_steps


def test_requeue_continues_exactly(slurm: Slurm) -> None:
    flags = requeued_flags(100)
    options = ("--gpus-per-node=2", "--requeue", "--", *flags, "--checkpoint-dir")
    calm = slurm.completed(slurm.submit("train_fsdp", *options, "checkpoints/calm"))
    job = slurm.submit("train_fsdp", *options, "checkpoints/requeued")
    slurm.wait_for_steps(job, last_step=5)
    preempt(slurm, job)
    check_requeued(slurm, job, 100, calm)
    assert "Requeued at step" in slurm.log(job).read_text()


@pytest.mark.long
def test_time_limit_requeues(slurm: Slurm) -> None:
    """The signal that Slurm itself sends before the limit."""
    flags = requeued_flags(1500)
    options = ("--requeue", "--signal=B:USR1@105", "--", *flags, "--checkpoint-dir")
    calm = slurm.completed(slurm.submit("train_no_fsdp", *options, "checkpoints/calm_limit"))
    job = slurm.submit("train_no_fsdp", "--time=2", *options, "checkpoints/limit")
    slurm.wait(job, lambda: slurm.show(job)["Restarts"] != "0", timeout_s=300)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    check_requeued(slurm, job, 1500, calm)


def test_search(slurm: Slurm) -> None:
    tokenizer = ("--tokenizer-name-or-path", "tests/data/tokenizer.json")
    job = slurm.submit("load_model_no_fsdp", "--", *tokenizer, "--low", "1", "--high", "2")
    assert slurm.end(job) == "COMPLETED", slurm.log(job).read_text()[-3000:]
    assert read_run(slurm.log(job)).probes


def test_scaling_line_falls_away_after_a_failure(slurm: Slurm) -> None:
    grid = "--factors 1,2,4 --gpus none --folder logs/scaling -- --batch-size 0".split()
    jobs = re.findall(r"job (\d+)", slurm.run("sbatch_files/submit_scaling.sh", *grid))
    assert len(jobs) == 3
    assert slurm.end(jobs[0]) == "FAILED"
    for job in jobs[1:]:
        assert slurm.end(job) == "CANCELLED" and not slurm.log(job).exists()


def test_bad_submissions_are_refused(slurm: Slurm) -> None:
    for words, reason in (
        (["nothing"], "NAME must be one of: load_model_no_fsdp "),
        (["train_fsdp", "--nodes=3"], "Slurm does not take this job"),
    ):
        done = subprocess.run(
            ["sbatch_files/submit.sh", *words], cwd=slurm.repo, env=slurm.environment,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode != 0 and reason in done.stderr and "Submitted" not in done.stdout
