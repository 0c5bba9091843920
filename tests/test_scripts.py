"""The real entry points through the real launcher: what they log, refuse, and do when hurt."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from run_log import RunLog, read_run
from train_config import FSDPTrainConfig, TrainConfig, is_graphed

ROOT = Path(__file__).resolve().parent.parent
COMMON = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 32 --training-steps 6 "
    "--model-dtype fp32 --learning-rate 1e-3 --lr-warmup-steps 3 --logging-frequency 2"
).split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        process.kill()  # a rank that stands still keeps the pipes open
        pytest.fail(f"still running after {timeout_s} s\n{error.output}\n{error.stderr}")
    return process.returncode, out, err


def run(*command: str, timeout_s: float = 100) -> tuple[int, str, str]:
    return finish(start(list(command)), timeout_s)


def log_of(text: str, tmp_path: Path) -> RunLog:
    path = tmp_path / "job.out"
    path.write_text(text)
    return read_run(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, RunLog]]:
    """One run each of train.py, train_fsdp.py on two ranks, and train_fsdp.py without torchrun."""
    folder = tmp_path_factory.mktemp("runs")
    commands = {
        "train": [sys.executable, "train.py", *COMMON, "--batch-size", "4"],
        "ranks": [*TORCHRUN, "2", "train_fsdp.py", *COMMON, "--batch-size", "2"],
        "alone": [
            sys.executable,
            "train_fsdp.py",
            *COMMON,
            *"--batch-size 2 --grad-accumulation-steps 2".split(),
        ],
    }
    logs = {}
    for name, command in commands.items():
        path = folder / "new folder" / f"{name}.out"
        code, out, err = run(*command, "--log-file", str(path))
        assert code == 0, err[-3000:]
        logs[name] = (out, read_run(path))
    return logs


def test_losses_of_all_scripts_agree(runs: Any) -> None:
    reference = runs["train"][1].steps
    assert [step.step for step in reference] == [1, 2, 4, 6]
    assert reference[-1].loss < reference[0].loss - 0.2
    for name in ("ranks", "alone"):
        for ours, theirs in zip(runs[name][1].steps, reference, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
            assert ours.training_tokens_pct == theirs.training_tokens_pct > 99


def test_log_file_is_the_standard_output(runs: Any) -> None:
    for out, log in runs.values():
        lines = out.splitlines(keepends=True)
        # The ranks' gloo (torch 2.10) says there that it is up, sometimes two of them in one line.
        lines = [line for line in lines if line.strip() and not line.startswith("[Gloo]")]
        assert "".join(lines) == log.path.read_text()
        assert lines[0].startswith("Run: {")
        assert lines[-1].startswith('End: {"status": "completed"')


def test_tflops_per_token_do_not_depend_on_sharding(runs: Any) -> None:
    flops = runs["train"][1].run["flops_per_token"]
    for _, log in runs.values():
        for step in log.steps:  # both are printed with two decimals
            assert abs(step.tflops - step.tokens_per_s * flops / 1e12) < 0.00501
    assert {log.run["flops_per_token"] for _, log in runs.values()} == {flops}
    assert {log.run["num_parameters"] for _, log in runs.values()} == {8_655_104}


def test_records_say_what_ran(runs: Any) -> None:
    record = runs["ranks"][1].run
    assert record["script"] == "train_fsdp.py" and record["fsdp"] and record["world_size"] == 2
    assert record["global_batch"] == 4 and record["tokens_per_step"] == 128
    assert runs["train"][1].run["data"] == record["data"]
    assert str(ROOT) not in runs["ranks"][0]
    end = runs["ranks"][1].end
    assert end["steps_done"] == 6 and end["peak_gib"] > 0
    assert end["digest"]["moved_share"] > 0.9
    assert end["digest"]["parameters"].keys() == runs["train"][1].end["digest"]["parameters"].keys()


def test_mfu_only_where_the_peak_is_known(runs: Any, tmp_path: Path) -> None:
    assert runs["train"][1].steps[0].mfu_pct is None
    command = [sys.executable, "train.py", *COMMON, "--training-steps", "1"]
    code, out, _ = run(*command, "--peak-tflops", "0.001", "--no-digest")
    [step] = log_of(out, tmp_path).steps
    assert code == 0 and step.mfu_pct is not None and step.mfu_pct > 0


BAD_INPUT = {
    "--dataset /nowhere.parquet": "nowhere",
    "--dataset tests/data/tokenizer.json": "parquet",
    "--tokenizer-name-or-path /nowhere/tokenizer.json": "tokenizer",
    "--sequence-length 0": "--sequence-length must be at least 1",
    "--batch-size 0": "--batch-size must be at least 1",
    "--batch-size 5000": "fewer than the 5000 rows",
    "--scaling-factor 0": "--scaling-factor must be at least 1",
    "--scaling-strategy depth": "--scaling-strategy",
    "--model-dtype fp16": "--model-dtype",
    "--model-dtype fp64": "--model-dtype",
    "--learning-rate nan": "--learning-rate must be greater than 0",
    "--no-such-flag": "--no-such-flag",
    "--learning-rate inf": "finite",
    "--set-seed 18446744073709551616": "--set-seed must be below",
    "--profile": "nothing to profile",
    "--log-file README.md/a.out": "README.md is no folder",
    "--dataset FOLDER/nulls.parquet": "no text",
    "--dataset FOLDER/twice.parquet": "several columns `text`",
    "--tokenizer-name-or-path FOLDER/mute.json": "no text that the tokenizer makes tokens of",
    "--training-steps many": "--training-steps",
}


def write_unusable(folder: Path) -> None:
    nulls, words = pa.array([None] * 20, pa.string()), pa.array(["word"] * 20)
    pq.write_table(pa.table({"text": nulls}), folder / "nulls.parquet")
    twice = pa.Table.from_arrays([words, words], names=["text", "text"])
    pq.write_table(twice, folder / "twice.parquet")
    Tokenizer(models.BPE(vocab={"Ω": 0}, merges=[])).save(str(folder / "mute.json"))


def test_reader_of_standard_output_may_leave(tmp_path: Path) -> None:
    """``train.py | head -1``: the training goes on, and its log file is whole."""
    path = tmp_path / "job.out"
    process = start([sys.executable, "train.py", *COMMON, "--log-file", str(path)])
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=100) == 0
    log = read_run(path)
    assert log.status == "completed"
    assert [step.step for step in log.steps] == [1, 2, 4, 6]


def test_launcher_that_is_killed_leaves_no_ranks(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    flags = ["--training-steps", "100000", "--log-file", str(path)]
    process = start([*TORCHRUN, "2", "train_fsdp.py", *COMMON, *flags])
    deadline = time.monotonic() + 60
    while not (path.exists() and read_run(path).steps) and time.monotonic() < deadline:
        time.sleep(0.5)
    with process:
        process.kill()
    deadline = time.monotonic() + 60
    while read_run(path).end is None and time.monotonic() < deadline:
        time.sleep(0.5)
    end = read_run(path).end
    assert end is not None
    assert end["status"] == "failed"
    assert "launcher is gone" in end["reason"]


def test_nodes_with_unequal_numbers_of_ranks_decide_alike(tmp_path: Path) -> None:
    """Whether gradients are exchanged hangs on the nodes; ranks that disagree wait for ever."""
    flags = [*COMMON, "--model-dtype", "bf16", "--compute-dtype", "bf16", "--no-compile"]
    agents = []
    for node, ranks in enumerate("21"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank"]
        launch += [str(node), "--nproc-per-node", ranks, "--master-addr", "127.0.0.1"]
        agents.append(start([*launch, "--master-port", "29731", "train_fsdp.py", *flags]))
    (code, out, _), (other, _, _) = (finish(agent) for agent in agents)
    log = log_of(out, tmp_path)
    assert code == other == 0 and log.status == "completed"
    record = log.run or {}
    found = [record[name] for name in ("world_size", "num_nodes", "gradients_exchanged")]
    assert found == [3, 2, False]


def test_bad_input_ends_with_one_line(tmp_path: Path) -> None:
    """All at once: each is a start of its own, but they can share the cores."""
    log_file = tmp_path / "never.out"
    write_unusable(tmp_path)
    for flags in BAD_INPUT:
        words = flags.replace("FOLDER", str(tmp_path)).split()
        command = [sys.executable, "train.py", *COMMON, "--log-file", str(log_file), *words]
        code, out, err = run(*command)
        assert code == 2, (flags, err)
        assert out == "" and len(err.splitlines()) == 1, (flags, out, err)
        assert BAD_INPUT[flags] in err, (flags, err)
        assert "Traceback" not in err
    assert not log_file.exists()


def test_bad_input_on_ranks_is_said_once() -> None:
    code, out, err = run(*TORCHRUN, "2", "train_fsdp.py", *COMMON, "--replicas", "3")
    assert code == 1 and out == ""
    assert err.count("--replicas must divide the number of ranks (2), not 3") == 1
    code, out, err = run(*TORCHRUN, "2", "train.py", *COMMON)
    assert code == 1 and err.count("use train_fsdp.py for several") == 1
    flags = ("--cpu-offload", "--cuda-graph", "on")
    code, out, err = run(sys.executable, "train_fsdp.py", *COMMON, *flags)
    assert (code, out) == (2, "") and "--cuda-graph on is not for --cpu-offload" in err


def test_small_steps_are_one_graph_where_that_was_run() -> None:
    def graphed(
        flops: float, device: str = "cuda", config: type = TrainConfig, **flags: Any
    ) -> bool:
        inputs: Any = SimpleNamespace(flops_per_token=flops)
        return is_graphed(config(**{"sequence_length": 1, "compile": True} | flags), inputs, device)

    for config in (TrainConfig, FSDPTrainConfig):
        assert graphed(1e14, config=config) and not graphed(2e14, config=config)
        assert graphed(2e14, config=config, cuda_graph="on")
        assert not graphed(1e14, config=config, cuda_graph="off")
        assert not graphed(1e14, "cpu", config, cuda_graph="on")
        assert not graphed(1e14, config=config, batch_size=2), "a micro-batch decides"
        assert graphed(1e14, config=config, grad_accumulation_steps=2)
    assert graphed(1e14, compile=False)
    assert not graphed(1e14, config=FSDPTrainConfig, compile=False)
    assert not graphed(1e14, config=FSDPTrainConfig, cpu_offload=True)


def test_dry_run_prints_the_plan_and_stops() -> None:
    code, out, _ = run(sys.executable, "train.py", *COMMON, "--dry-run")
    assert code == 0 and "8,655,104" in out and "Step:" not in out


def test_steps_without_a_training_token(tmp_path: Path) -> None:
    """Every document is null but one: loss 0 where nothing counts, and no weight moves then."""
    path = tmp_path / "thin.parquet"
    pq.write_table(pa.table({"text": pa.array([None, "a few words of text"])}), path)
    command = [sys.executable, "train.py", *COMMON, "--dataset", str(path), "--no-packing"]
    code, out, err = run(*command, "--logging-frequency", "1", "--num-workers", "0")
    log = log_of(out, tmp_path)
    assert code == 0, err
    empty = [step for step in log.steps if step.training_tokens_pct == 0]
    full = [step for step in log.steps if step.training_tokens_pct > 0]
    assert len(empty) == len(full) == 3
    assert all(step.loss == 0 and step.grad_norm == 0 for step in empty)
    assert full[-1].loss < full[0].loss
    assert [step.learning_rate for step in log.steps][:3] == pytest.approx(
        [1e-3 / 3, 2e-3 / 3, 1e-3], rel=1e-4
    )


def hurt(fault: str, *flags: str, script: str = "train_fsdp.py", ranks: int = 2) -> list[str]:
    launch = [*TORCHRUN, str(ranks)] if script == "train_fsdp.py" else [sys.executable]
    return [*launch, "tests/faulty_train.py", fault, script, *COMMON, *flags]


def seconds_since_fault(stderr: str) -> float:
    """Call when the job has ended: for how long it outlived what happened to a rank of it."""
    _, told, when = stderr.partition("fault at ")
    assert told, f"the fault did not happen: {stderr[-2000:]}"
    return time.time() - float(when.split()[0])


def test_out_of_memory_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    one_by_one = ("--cuda-graph", "off")  # a replayed graph allocates nothing
    code, out, err = run(*hurt("out_of_memory", *one_by_one))
    log = log_of(out, tmp_path)
    assert code == 1 and seconds_since_fault(err) < 40  # torchrun's status, not ours
    assert log.end is not None and log.end["status"] == "out_of_memory"
    assert log.end["phase"] == "forward" and "(rank 1)" in log.end["reason"]
    assert "--activation-checkpointing full" in log.end["reason"]
    assert log.end["steps_done"] == 2 and "OutOfMemoryError" not in err
    code, out, _ = run(*hurt("out_of_memory", *one_by_one, script="train.py"))
    assert code == 3
    log = log_of(out, tmp_path)
    assert log.end is not None and log.end["status"] == "out_of_memory"


def test_exception_or_death_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    for fault, word in (("exception", "planted exception"), ("kill", "")):
        code, out, _ = run(*hurt(fault), timeout_s=60)
        log = log_of(out, tmp_path)
        assert code == 1, fault
        assert log.status in (("failed",) if word else ("failed", "killed")), out[-500:]
        if word:
            assert log.end is not None and word in log.end["reason"]


def test_stopped_rank_ends_the_job_after_the_timeout(tmp_path: Path) -> None:
    code, out, _ = run(*hurt("stop", "--collective-timeout-s", "5"), timeout_s=75)
    log = log_of(out, tmp_path)
    assert code == 1 and log.end is not None
    assert log.end["status"] == "failed" and "no progress for" in log.end["reason"]


def test_rank_that_stops_before_the_first_step_ends_the_job(tmp_path: Path) -> None:
    """Building and compiling may take long, but then every process shows signs of life."""
    code, out, err = run(*hurt("stop_early", "--collective-timeout-s", "2", ranks=3), timeout_s=120)
    log = log_of(out, tmp_path)
    assert code == 1 and log.end is not None and seconds_since_fault(err) < 60
    assert log.end["status"] == "failed" and log.end["steps_done"] == 0
    assert "no sign of life for 8 s" in log.end["reason"] and "(rank 2)" in log.end["reason"]


def test_signals_end_at_a_step_boundary(tmp_path: Path) -> None:
    """One rank is asked to stop, twice over: all ranks agree on the step."""
    code, out, _ = run(*hurt("sigterm", "--training-steps", "500"))
    log = log_of(out, tmp_path)
    assert log.end is not None and log.end["status"] == "preempted", out[-500:]
    assert log.end["steps_done"] == 3 and code == 1
    code, out, _ = run(*hurt("sigterm", "--training-steps", "500", script="train.py"))
    assert code == 143 and log_of(out, tmp_path).status == "preempted"


def test_no_interpreter_of_several_ranks_shuts_down() -> None:
    # It would race gloo's threads: of runs of four ranks that did little else, one in six aborted.
    code, _, err = run(*hurt("none", script="train.py"))
    assert code == 0 and "the interpreter shuts down" in err
    code, out, err = run(*hurt("none"))
    assert code == 0 and "completed" in out and "the interpreter shuts down" not in err


def test_loss_that_is_not_finite_fails_the_job(tmp_path: Path) -> None:
    code, out, err = run(*hurt("nan", script="train.py"))
    log = log_of(out, tmp_path)
    assert code == 1 and log.end is not None and log.end["status"] == "failed"
    assert "loss of step 4 is not finite" in log.end["reason"] and "Traceback" not in err
    code, out, _ = run(*hurt("nan", "--no-fail-on-nonfinite", script="train.py"))
    assert code == 0 and log_of(out, tmp_path).status == "completed"
