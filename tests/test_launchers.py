"""Do the launchers ask for what they should, and decide rightly at a job's end? Without a Slurm.

Their commands (srun, scontrol, Python) are stand-ins here; tests/test_slurm.py runs the real ones.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tyro

from train_config import FSDPTrainConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "sbatch_files"
LAUNCHERS = sorted(path for path in FOLDER.glob("*.sh") if "#SBATCH" in path.read_text()[:40])
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *ROOT.glob("tests/slurm/*.sh"), ROOT / "demo.sh"])
ORIGINAL = {
    "learning_rate": 5e-5, "lr_warmup_steps": 100, "training_steps": 100, "set_seed": 42,
    "sequence_length": 4096, "batch_size": 1,
}  # fmt: skip
SRUN = r"""#!/bin/bash
[[ $1 != --help ]] || { echo "$FAKE_HELP"; exit; }
printf '%s\n' "$@" >"$FAKE/srun.new"
[[ -n $FAKE_WAIT ]] || { mv "$FAKE/srun.new" "$FAKE/srun"; exit "$FAKE_STATUS"; }
stop() {
  sleep "$1"
  echo "Step: $FAKE_STEP | Loss: 1.0"
  echo "End: {\"status\": \"preempted\", \"steps_done\": $FAKE_STEP}"
  exit 1
}
trap 'stop 0' USR1
trap 'stop 1' TERM
mv "$FAKE/srun.new" "$FAKE/srun"
for _ in {1..600}; do sleep 0.1; done
"""
SCONTROL = r"""#!/bin/bash
case $* in
  'show hostnames '*) tr , '\n' <<<"${*#show hostnames }" ;;
  *'show job'*) echo "JobId=7 JobState=RUNNING Requeue=$FAKE_REQUEUE Restarts=0 NodeList=x" ;;
  requeue*) echo "$*" >>"$FAKE/requeued" ;;
esac
"""
PYTHON = r"""#!/bin/bash
[[ $* != *cuda.device_count* ]] || { echo 1; exit; }
[[ $1 != -c ]] || exec "$FAKE_REAL_PYTHON" "$@"
[[ $* != *--dry-run ]] || { echo "largest batch size on an empty GPU $FAKE_LARGEST"; exit; }
echo "$*" >>"$FAKE/python"
echo $$ >"$FAKE/python.pid"
sleep "$FAKE_SLEEP"
log='' factor='' batch=''
while (($#)); do
  case $1 in
    --log-file) log=$2 ;;
    --scaling-factor) factor=$2 ;;
    --batch-size) batch=$2 ;;
  esac
  shift
done
[[ -n $log ]] || exit 0
status=completed
((factor * batch < 4)) || status=out_of_memory
printf 'Run: {"schema": 1}\nEnd: {"status": "%s"}\n' "$status" >>"$log"
"""


class Bench:
    """A folder with the stand-ins, and a batch job started in it as Slurm would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "job.out"
        (folder / "venv" / "bin").mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("venv/bin/python", PYTHON)):
            target = folder / (name if "/" in name else f"bin/{name}")
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
            target.chmod(0o755)
        self.log.touch()
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE": str(folder),
            "FAKE_HELP": "", "FAKE_WAIT": "", "FAKE_STATUS": "0", "FAKE_STEP": "0",
            "FAKE_SLEEP": "0",
            "FAKE_REQUEUE": "1", "FAKE_REAL_PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "test",
            "SLURM_JOB_NODELIST": "nid001", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
            "SLURM_GPUS_ON_NODE": "4", "NCCL_DEBUG_FILE": "", "FSDP_VENV": "",
        }  # fmt: skip
        for name in ("FSDP_ENVIRONMENT", "RANKS_PER_NODE", "SLURM_RESTART_COUNT", "FSDP_VENV"):
            self.environment.pop(name, None)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        (self.folder / "srun").unlink(missing_ok=True)
        with self.log.open("a") as log, (self.folder / "err").open("w") as err:
            return subprocess.Popen(
                ["bash", *command], cwd=ROOT, env=self.environment | environment, text=True,
                stdout=log, stderr=err, start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        status = self.start(*command, **environment).wait(timeout=60)
        return status, (self.folder / "err").read_text()

    def signalled(self, *, cancel: bool = False, **environment: str) -> int:
        """Exit status of a training job that gets USR1 twice (before, if cancelled, TERM)."""
        process = self.start("sbatch_files/train_fsdp.sh", FAKE_WAIT="yes", **environment)
        for _ in range(600):
            if (self.folder / "srun").exists():
                break
            time.sleep(0.05)
        if cancel:
            os.killpg(process.pid, signal.SIGTERM)
        for _ in range(2):
            os.kill(process.pid, signal.SIGUSR1)
        try:
            return process.wait(timeout=60)
        finally:  # the stand-in of srun may have outlived its job, as it would not under Slurm
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def srun(self) -> list[str]:
        return (self.folder / "srun").read_text().splitlines()

    def num_requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def config_class_of(script: str) -> Any:
    known = {"train.py": TrainConfig, "train_fsdp.py": FSDPTrainConfig}
    if script in known:
        return known[script]
    module = import_module(Path(script).stem)
    [found] = [
        item
        for item in vars(module).values()
        if dataclasses.is_dataclass(item)
        and "low" in {field.name for field in dataclasses.fields(item)}
    ]
    return found


def parse(script: str, flags: list[str]) -> Any:
    return tyro.cli(config_class_of(script), args=flags)


def directives(path: Path) -> dict[str, str]:
    pairs = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", path.read_text(), re.MULTILINE)
    assert len(dict(pairs)) == len(pairs) > 5
    return dict(pairs)


def test_shellcheck() -> None:
    assert len(SCRIPTS) > 8
    command = [str(Path(sys.executable).with_name("shellcheck")), *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_directives() -> None:
    names = {path.stem for path in LAUNCHERS}
    assert names == {"load_model_no_fsdp", "loss_ablation_fsdp", "loss_ablation_no_fsdp",
                     "train_fsdp", "train_no_fsdp"}  # fmt: skip
    for path in LAUNCHERS:
        asked = directives(path)
        assert len(path.read_text().splitlines()) <= 25
        assert asked["job-name"] == path.stem and asked["ntasks-per-node"] == "1"
        assert asked["output"] == f"logs/{path.stem}/%x-%j.out"
        assert (ROOT / "logs" / path.stem / ".gitkeep").exists(), "Slurm makes no folder"
        assert asked["open-mode"] == "append" and asked["signal"].startswith("B:USR1@")
        assert asked["no-requeue"] == "" and {"nodes", "gpus-per-node", "time"} <= asked.keys()


def launched(bench: Bench, path: Path, *flags: str) -> tuple[str, Any]:
    """(script, its config) that a launcher has srun run."""
    code, err = bench.run(str(path.relative_to(ROOT)), *flags)
    assert code == 0, err
    words = bench.srun()
    place = words.index("sbatch_files/node.sh")
    return words[place + 1], parse(words[place + 1], words[place + 2 :])


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_flags_parse_with_the_real_config(bench: Bench, path: Path) -> None:
    script, config = launched(bench, path, "--scaling-strategy", "n_layers")
    assert config.scaling_strategy == "n_layers", 'the launcher passes "$@" on'
    if script.startswith("train"):
        assert {name: getattr(config, name) for name in ORIGINAL} == ORIGINAL


def test_loss_ablation_compares_equal_global_batches(bench: Bench) -> None:
    rows = []
    for name in ("loss_ablation_fsdp", "loss_ablation_no_fsdp"):
        path = FOLDER / f"{name}.sh"
        _, config = launched(bench, path)
        num_gpus = int(directives(path)["gpus-per-node"])
        rows.append(num_gpus * config.batch_size * config.grad_accumulation_steps)
    assert rows[0] == rows[1] > 1


def test_container_only_where_srun_knows_it(bench: Bench) -> None:
    help_text = "--environment=NAME  Container environment"
    for environment, expected in (
        ({}, []),
        ({"FAKE_HELP": help_text}, ["--environment=ngc_pt_jan"]),
        ({"FAKE_HELP": help_text, "FSDP_ENVIRONMENT": "mine"}, ["--environment=mine"]),
        ({"FAKE_HELP": help_text, "FSDP_ENVIRONMENT": ""}, []),
    ):
        code, err = bench.run("sbatch_files/train_fsdp.sh", **environment)
        assert code == 0, err
        assert [word for word in bench.srun() if word.startswith("--environment")] == expected


def test_a_failing_command_fails_the_job(bench: Bench) -> None:
    assert bench.run("sbatch_files/train_fsdp.sh", FAKE_STATUS="3")[0] == 3
    assert "status 3" in bench.log.read_text()
    code, err = bench.run("sbatch_files/train_fsdp.sh", SLURM_GPUS_ON_NODE="")
    assert code == 2 and "--gpus-per-node" in err and len(err.splitlines()) == 1
    code, err = bench.run("sbatch_files/train_no_fsdp.sh", SLURM_JOB_NODELIST="a,b")
    assert code == 2 and "runs on one node, not 2" in err
    code, err = bench.run("sbatch_files/train_fsdp.sh", SLURM_SUBMIT_DIR=str(bench.folder))
    assert code != 0 and "common.sh" in err


def test_requeue_after_the_signal_until_nothing_moves(bench: Bench) -> None:
    for step in ("5", "9", "9", "8", "9"):
        assert bench.signalled(FAKE_STEP=step) == 1
    text = bench.log.read_text()
    assert re.findall(r"Requeued at step (\d+), (\d+)", text) == [
        ("5", "0"), ("9", "0"), ("9", "1"), ("9", "2"),
    ]  # fmt: skip
    assert "Not requeued: 3 restarts did not get beyond step 9" in text
    assert bench.num_requeued() == 4
    assert bench.signalled(FAKE_STEP="30") == 1
    assert bench.num_requeued() == 5, "progress starts the count anew"


def test_no_requeue_unless_asked_for_and_preempted(bench: Bench) -> None:
    assert bench.signalled(FAKE_REQUEUE="0", FAKE_STEP="5") == 1
    assert bench.signalled(cancel=True, FAKE_STEP="6") == 1
    assert bench.log.read_text().count('"preempted"') == 2, "what the ranks say last is kept"
    assert bench.run("sbatch_files/train_fsdp.sh", FAKE_STATUS="1")[0] == 1
    assert bench.num_requeued() == 0, "the preempted End: in the log is an earlier attempt's"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_of_a_node(bench: Bench, num_nodes: int) -> None:
    code, err = bench.run(
        "sbatch_files/node.sh", "train_fsdp.py", "--batch-size", "2",
        FSDP_VENV=str(bench.folder / "venv"), HEAD_NODE="nid001", SLURM_NNODES=str(num_nodes),
        SLURM_JOB_ID="20007",
    )  # fmt: skip
    assert code == 0, err
    preflight, ranks = (bench.folder / "python").read_text().splitlines()
    assert preflight == "preflight.py 4 train_fsdp.py --batch-size 2"
    where = "--standalone" if num_nodes == 1 else (
        "--nnodes 2 --rdzv-backend c10d --rdzv-id 20007 --rdzv-endpoint nid001:10007"
    )  # fmt: skip
    assert ranks == (
        f"-m torch.distributed.run {where} --nproc-per-node 4 train_fsdp.py --batch-size 2"
    )


def test_missing_environment_is_said(bench: Bench) -> None:
    code, err = bench.run("sbatch_files/node.sh", "train.py", FSDP_VENV="nowhere")
    assert code == 2 and "nowhere/bin/python" in err and len(err.splitlines()) == 1


def test_preflight_refuses_what_will_not_do() -> None:
    command = [sys.executable, "preflight.py"]
    options: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([*command, "99"], **options)
    assert done.returncode == 2 and "99 asked" in done.stderr.splitlines()[-1]
    done = subprocess.run([*command, "0", "train.py", "--batch-size", "0"], **options)
    assert done.returncode == 2 and "torch 2." in done.stdout
    assert done.stderr == "train.py: error: --batch-size must be at least 1, not 0 (see --help)\n"
    done = subprocess.run([*command, "0", "--batch-size", "1"], **options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "preflight.py: error: --batch-size is no script (see --help)\n"
    plan = ["0", "train.py", "--scaling-factor", "99"]
    done = subprocess.run([*command, *plan], **options)
    assert done.returncode == 0 and "WARNING: " in done.stdout and "of this machine" in done.stdout
    for words in ([], ["four"]):
        done = subprocess.run([*command, *words], **options)
        assert done.returncode == 2 and done.stdout == "", done.stdout
        assert done.stderr.startswith("preflight.py: error: NUM_GPUS") and "--help" in done.stderr


def test_help_is_printed() -> None:
    commands = {
        "python preflight.py NUM_GPUS [SCRIPT [FLAGS...]]": [sys.executable, "preflight.py"],
        "sbatch_files/submit.sh NAME": ["sbatch_files/submit.sh"],
        "--max-minutes M ": ["sbatch_files/submit_scaling.sh", "--factors", "1"],
    }
    for usage, command in commands.items():
        done = subprocess.run(
            [*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert usage in done.stdout and len(done.stdout.splitlines()) > 2, done.stdout
        assert "#" not in done.stdout and "set -" not in done.stdout, done.stdout


def scaling(bench: Bench, *flags: str, **changes: str) -> list[str]:
    command = ["bash", "sbatch_files/submit_scaling.sh", "--folder", str(bench.folder), *flags]
    environment = bench.environment | {"FSDP_VENV": str(bench.folder / "venv")} | changes
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=True
    ).stdout.splitlines()


def test_scaling_grid_is_chained(bench: Bench) -> None:
    lines = scaling(bench, *"--print --factors 1,2 --batch-sizes 1,2 --gpus 8".split(), "--",
                    "--compute-dtype", "fp32")  # fmt: skip
    assert len(lines) == 2 * 2 * 2
    names, parents = [], []
    for line in lines:
        script = "train_fsdp.py" if "train_fsdp.sh" in line else "train.py"
        config = parse(script, line.split(".sh ")[1].split())
        assert config.compute_dtype == "fp32" and config.training_steps == 40
        assert config.set_seed == 42 and config.sequence_length == 4096
        assert ("--nodes=2 --gpus-per-node=4" in line) == config.fsdp
        names.append((config.fsdp, config.scaling_factor, config.batch_size))
        parent = re.search(r"afterok:JOB_OF_all_(\d)_batch_(\d)_gpus_\d_(no_)?fsdp --kill", line)
        parents.append(parent and (not parent[3], int(parent[1]), int(parent[2])))
    for line, parent in zip(names, parents, strict=True):
        fsdp, factor, batch = line
        expected = (fsdp, factor, 1) if batch == 2 else (fsdp, 1, 1) if factor == 2 else None
        assert parent == expected
    assert len(set(names)) == len(names)
    assert len(scaling(bench, "--print", "--gpus", "none")) == 20, "the default goes on to 24"


def test_scaling_refuses_before_anything_is_submitted(bench: Bench) -> None:
    for flags in ("--max-minutes 1,2", "--gpus-per-node 1,2", "--strategies depth", "--gpus 1,10",
                  "--gpus 6", "--no-fsdp maybe", "--factors 1,,2"):  # fmt: skip
        with pytest.raises(subprocess.CalledProcessError) as caught:
            scaling(bench, "--print", *flags.split())
        error = caught.value
        assert error.returncode == 2 and error.stdout == "", flags
        assert error.stderr.startswith("submit_scaling.sh: error: "), error.stderr
        assert len(error.stderr.splitlines()) == 1, error.stderr
    missing = bench.folder / "missing"
    assert scaling(bench, "--print", "--factors", "1", "--folder", str(missing))
    assert not missing.exists()


def test_scaling_here_stops_at_out_of_memory_and_goes_on(bench: Bench) -> None:
    """The stand-in for training is out of memory where factor × batch size reaches 4."""
    grid = "--local --max-minutes 1 --factors 1,2,4,8 --batch-sizes 1,2,4 --gpus 1,2".split()
    lines = scaling(bench, *grid)
    suffix = "gpus_1_no_fsdp"
    assert [line for line in lines if suffix in line] == [
        f"all_1_batch_1_{suffix}: completed",
        f"all_1_batch_2_{suffix}: completed",
        f"all_1_batch_4_{suffix}: out_of_memory",
        f"all_2_batch_1_{suffix}: completed",
        f"all_2_batch_2_{suffix}: out_of_memory",
        f"all_4_batch_1_{suffix}: out_of_memory",
    ]
    assert lines[-1] == "2 GPUs: only 1 here, not run"
    calls = (bench.folder / "python").read_text().splitlines()
    assert len(calls) == 12
    unfinished = bench.folder / f"all_1_batch_2_{suffix}.out"
    unfinished.write_text('Run: {"schema": 1}\n')
    again = scaling(bench, *grid)
    assert sum("not run again" in line for line in again) == 11
    assert len((bench.folder / "python").read_text().splitlines()) == 13
    record = json.loads(unfinished.read_text().splitlines()[-1].removeprefix("End: "))
    assert record == {"status": "completed"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_scaling_here_ends_its_point_with_it(bench: Bench, number: signal.Signals) -> None:
    command = ["bash", "sbatch_files/submit_scaling.sh", "--folder", str(bench.folder)]
    command += "--local --max-minutes 2 --factors 1,2 --gpus none".split()
    environment = bench.environment | {"FSDP_VENV": str(bench.folder / "venv"), "FAKE_SLEEP": "90"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    pid_file = bench.folder / "python.pid"
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        time.sleep(0.1)
        assert process.poll() is None
    started = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "completed" not in out and not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_scaling_here_takes_the_largest_batch_that_should_fit(bench: Bench) -> None:
    grid = "--local --max-minutes 1 --factors 1,2 --gpus 1 --batch-sizes 1,largest".split()
    for largest, batches in (("3", "1 3"), ("1", "1")):
        lines = scaling(bench, *grid, "--folder", str(bench.folder / largest), FAKE_LARGEST=largest)
        wanted = [f"all_1_batch_{batch}_gpus_1_fsdp: completed" for batch in batches.split()]
        assert [line for line in lines if "all_1" in line and "_no_" not in line] == wanted
    with pytest.raises(subprocess.CalledProcessError) as caught:
        scaling(bench, "--print", "--batch-sizes", "1,largest")
    assert "largest needs --local" in caught.value.stderr


@pytest.mark.parametrize("seconds_gone", ["60", "57"])
def test_scaling_here_says_when_its_minutes_are_over(bench: Bench, seconds_gone: str) -> None:
    """Before a point, or in the middle of the only one. (bash counts on from a given SECONDS.)"""
    grid = "--local --max-minutes 1 --factors 1".split()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        scaling(bench, *grid, SECONDS=seconds_gone, FAKE_SLEEP="30")
    assert caught.value.returncode == 3
    assert caught.value.stdout.splitlines()[-1].startswith("1 minutes are over; ")
    assert "completed" in scaling(bench, *grid)[0], "the same command goes on"
