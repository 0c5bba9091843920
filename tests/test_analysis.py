"""Does the table say what the logs say, and are runs that differ kept apart?"""

import csv
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from analysis import (
    CONFIGURATION,
    ONE_BY_ONE,
    ONE_GRAPH,
    facts,
    find_logs,
    load_runs,
    mean_metrics,
    pool,
    table,
)
from breakdown import KINDS
from model_config import build_config, count_params, flops_per_token
from run_log import LogWriter, RunLog, StepRecord, format_step, read_run

SEED_LOGS = Path(__file__).resolve().parents[2] / "shared" / "seed_logs"
needs_seed_logs = pytest.mark.skipif(not SEED_LOGS.is_dir(), reason="older logs are not public")

SHAPE = build_config("all", 2, 131_072)
H200 = "NVIDIA H200"
FLAGS = {
    "scaling_strategy": "all",
    "scaling_factor": 2,
    "batch_size": 3,
    "grad_accumulation_steps": 2,
    "sequence_length": 4096,
    "model_dtype": "bf16",
    "activation_checkpointing": "selective",
    "compile": True,
    "packing": True,
    "training_steps": 40,
    "set_seed": 42,
    "log_file": "x.out",
}
RECORD: dict[str, Any] = {
    "schema": 1,
    "script": "train_fsdp.py",
    "config": FLAGS,
    "fsdp": True,
    "commit": "abc",
    "dirty": True,
    "versions": {"torch": "2.11"},
    "device": H200,
    "compute_dtype": "bfloat16",
    "peak_tflops": 989.0,
    "world_size": 8,
    "num_nodes": 2,
    "replicas": 1,
    "global_batch": 48,
    "model": asdict(SHAPE),
    # As a wrapped model counts itself; the analysis must not believe it.
    "num_parameters": 1,
    "flops_per_token": 1,
}
END = {"status": "completed", "peak_gib": 70.5, "peak_reserved_gib": 80.25}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the log of a run: tokens/s of steps 1, 2, …, its Run record, its End record."""

    def write_log(
        speeds: list[float],
        record: dict[str, Any] | None = RECORD,
        end: dict[str, Any] | None = END,
        name: str = "job.out",
    ) -> Path:
        writer = LogWriter(tmp_path / "logs" / name)
        if record is not None:
            writer.record("Run", record)
        for step, speed in enumerate(speeds, start=1):
            writer.step(StepRecord(step, 11.0, speed, 90.0 + step, 1.0, 2.0, peak_gib=60.0 + step))
        if end is not None:
            writer.record("End", end)
        writer.close()
        return tmp_path / "logs" / name

    return write_log


@needs_seed_logs
def test_means_of_the_older_logs() -> None:
    columns = {
        "fsdp": "fsdp",
        "gpus": "gpus",
        "scaling_factor": "factor",
        "logged_steps_after_step_1": "num_steps",
        "tokens_per_s": "tokens_per_s",
        "training_tokens_pct": "training_tokens_pct",
        "mfu_pct_as_logged": "mfu_pct_as_logged",
        "tflops_as_logged": "tflops_as_logged",
        "mfu_pct_from_config": "mfu_pct",
        "tflops_from_config": "tflops",
    }
    with (SEED_LOGS / "expected_means.csv").open() as file:
        expected = list(csv.DictReader(file))
    assert len(expected) == 17
    for row in expected:
        run = read_run(SEED_LOGS / row["log"])
        found = asdict(facts(run)) | asdict(mean_metrics(run))
        for column, name in columns.items():
            value = found[name]
            text = "" if value is None else f"{value:.2f}" if type(value) is float else str(value)
            assert text == row[column], (row["log"], column)
        assert found["peak_tflops"] == 989


@needs_seed_logs
def test_facts_of_the_older_logs() -> None:
    runs, unusable = load_runs(SEED_LOGS)
    assert [path.parent.name for path, _ in unusable] == 2 * ["load_model_no_fsdp"]
    assert all("not a log of a training" in reason for _, reason in unusable)
    by_name = {run.path.name: facts(run) for run in runs}
    alone, wrapped = by_name["lsai-460955.out"], by_name["lsai-461379.out"]
    assert (alone.fsdp, alone.fsdp_source) == (False, "folder name train_no_fsdp")
    assert (wrapped.fsdp, wrapped.fsdp_source) == (True, "log")
    assert (alone.gpus, alone.nodes, wrapped.gpus, wrapped.nodes) == (1, 1, 2, 2)
    assert (alone.device, alone.peak_source) == (None, "logged TFLOPs and MFU")
    assert (wrapped.device, wrapped.peak_source) == ("NVIDIA GH200 120GB", "device name")
    assert alone.num_parameters == wrapped.num_parameters == 190_857_728
    assert by_name["lsai-460981.out"].factor == 10  # published as 2
    assert by_name["lsai-460667.out"].status == "out_of_memory"
    means = mean_metrics(read_run(SEED_LOGS / "loss_ablation_fsdp/lsai-454149.out"), skip_steps=0)
    assert means.mfu_pct_as_logged == pytest.approx(6.08, abs=0.005)
    assert means.mfu_pct == pytest.approx(25.09, abs=0.005)
    assert means.tflops == pytest.approx(248.12, abs=0.005)
    pooled = pool(table(runs))
    repeated = pooled[(pooled["gpus"] == 16) & (pooled["factor"] == 10)]
    assert repeated["n"].tolist() == [2]
    assert repeated["tokens_per_s"].item() == pytest.approx((2208.4015 + 2222.2655) / 2)


def test_older_log_needs_its_folder(tmp_path: Path) -> None:
    words = (
        "Namespace(sequence_length=4096, batch_size=1, training_steps=100)\n"
        "Loading a model with scale=2, scaling_strategy=ScalingStrategy.ALL, config:\n"
        "vocab_size=131072\n"
    )
    for folder, fsdp in (("train_fsdp", True), ("train_no_fsdp", False), ("elsewhere", None)):
        path = tmp_path / folder / "job.out"
        path.parent.mkdir()
        path.write_text(words)
        if fsdp is None:
            with pytest.raises(ValueError, match="whether it used FSDP"):
                facts(read_run(path))
        else:
            assert facts(read_run(path)).fsdp is fsdp


def test_facts_and_metrics_of_a_run(write: Write) -> None:
    run = read_run(write([1.0] * 10 + [100.0, 200.0, 600.0, 300.0]))
    what, means = facts(run), mean_metrics(run)
    assert (what.gpus, what.nodes, what.global_batch, what.batch_size) == (8, 2, 48, 3)
    assert (what.compute_dtype, what.activation_checkpointing) == ("bf16", "selective")
    assert (what.compiled, what.commit, what.torch_version) == (True, "abc+", "2.11")
    assert json.loads(what.other_flags) == {"packing": True}
    assert what.num_parameters == count_params(SHAPE) == 190_857_728
    assert what.flops_per_token == flops_per_token(SHAPE, 4096)
    assert (means.num_steps, means.first_step, means.last_step) == (4, 11, 14)
    assert (means.tokens_per_s, means.tokens_per_s_median) == (300.0, 250.0)
    assert (means.tokens_per_s_p25, means.tokens_per_s_p75) == (175.0, 375.0)
    assert means.training_tokens_pct == 102.5
    assert means.tflops == pytest.approx(300 * flops_per_token(SHAPE, 4096) / 1e12)
    assert means.mfu_pct == pytest.approx(100 * (means.tflops or 0) / 989)
    assert (means.mfu_pct_as_logged, means.tflops_as_logged) == (1.0, 2.0)
    # The peak is that of the whole run, also of steps that the means leave out.
    assert (means.peak_gib, means.peak_reserved_gib) == (74.0, 80.25)
    assert mean_metrics(run, skip_steps=0).num_steps == 14
    assert mean_metrics(run, skip_steps=12).tokens_per_s == 450.0


def test_launching_is_told_apart_from_what_is_usual_today(write: Write) -> None:
    def launched(factor: int = 2, flag: Any = "auto", batch: int = 1, **told: Any) -> str:
        flags = {"cuda_graph": flag, "scaling_factor": factor, "batch_size": batch}
        flags |= {key: told.pop(key) for key in ("compile", "cpu_offload") if key in told}
        record = RECORD | {"model": asdict(build_config("all", factor, 131_072))} | told
        name = f"{factor} {flags} {told}.out"
        run = read_run(write([1.0], record | {"config": FLAGS | flags}, name=name))
        return facts(run).launched

    # A step of FSDP was never one CUDA graph before logs told whether it is.
    assert launched() == launched(cuda_graph=False) == ONE_BY_ONE
    assert launched(cuda_graph=True) == launched(flag="on") == launched(fsdp=False) == ""
    assert launched(factor=10) == launched(factor=10, flag="off") == launched(batch=120) == ""
    assert launched(factor=10, cuda_graph=True) == launched(factor=10, flag="on") == ONE_GRAPH
    assert launched(flag="off", fsdp=False) == ONE_BY_ONE
    assert launched(compile=False) == launched(cpu_offload=True) == launched(replicas=2) == ""
    assert launched(device_type="cpu") == launched(device_type="cpu", flag="on") == ""
    odd_ones: list[dict[str, Any]] = [{"flag": "maybe"}, {"flag": []}, {"cuda_graph": "yes"}]
    for odd in [*odd_ones, {"cuda_graph": [1]}]:
        with pytest.raises(ValueError, match="a record lacks a field, or has a strange one"):
            launched(**odd)
    with pytest.raises(ValueError, match="batch_size"):
        facts(read_run(write([1.0], RECORD | {"config": FLAGS | {"batch_size": "1"}}, name="x")))


def test_gradients_that_are_exchanged_make_another_configuration(write: Write) -> None:
    told: list[dict[str, Any]] = [{}, {"gradients_exchanged": False}, {"gradients_exchanged": True}]
    paths = [write([1.0] * 11, RECORD | more, name=f"{more}.out") for more in told]
    flags = [json.loads(facts(read_run(path)).other_flags) for path in paths]
    assert flags == [{"packing": True}] * 2 + [{"packing": True, "gradients_exchanged": True}]
    for odd in ("false", ["x"], 1.5):
        path = write([1.0] * 11, RECORD | {"gradients_exchanged": odd}, name="odd.out")
        with pytest.raises(ValueError, match="strange"):
            facts(read_run(path))


def test_a_window_that_reaches_into_the_warm_up_is_left_out(write: Write) -> None:
    run = read_run(write([1.0, 2.0, 40.0, 60.0]))

    def averaged(*numbers: int) -> float | None:
        steps = [replace(step, step=n) for step, n in zip(run.steps, numbers, strict=False)]
        return mean_metrics(replace(run, steps=steps)).tokens_per_s

    assert averaged(1, 100, 200, 300) == 50.0  # step 100 tells of steps 2 to 100
    assert averaged(1, 10, 20, 30) == 50.0
    assert averaged(1, 100) == 2.0, "there is no other"


def test_a_resumed_run_is_averaged_without_its_second_warm_up(write: Write) -> None:
    run = read_run(write([1.0] * 10 + [10.0] * 10 + [1.0] * 10 + [20.0] * 5 + [500.0] * 20))
    first = run.runs[0]
    again = first | {"resumed_from_step": 20}
    other = again | {"resumed_from_step": 35, "world_size": 7}
    graphed = other | {"world_size": again["world_size"], "cuda_graph": True}
    exchanged = graphed | {"cuda_graph": again.get("cuda_graph"), "gradients_exchanged": True}
    on_nodes = exchanged | {"gradients_exchanged": None, "num_nodes": 7}
    for last in (other, graphed, exchanged, on_nodes):
        found = mean_metrics(replace(run, runs=[first, again, last]))
        assert (found.num_steps, found.first_step, found.last_step) == (15, 11, 35)
        assert found.tokens_per_s == pytest.approx((10 * 10 + 5 * 20) / 15)


def test_what_is_not_known_is_none(write: Write) -> None:
    short = mean_metrics(read_run(write([5.0, 6.0])))
    assert short.num_steps == 0
    assert short.tokens_per_s is short.mfu_pct is short.tokens_per_s_median is None
    cpu = RECORD | {"device": "x86_64", "peak_tflops": None, "dirty": None}
    run = read_run(write([5.0] * 12, cpu, None, name="cpu.out"))
    means, what = mean_metrics(run), facts(run)
    assert (means.tokens_per_s, means.mfu_pct) == (5.0, None)
    assert means.tflops is not None
    assert (what.peak_source, what.commit, what.status) == ("unknown", "abc", "killed")
    bare = mean_metrics(read_run(write([5.0] * 3, None, None, name="bare.out")), skip_steps=0)
    assert (bare.tokens_per_s, bare.tflops) == (5.0, None)


def test_unusable_logs_are_named_with_the_reason(write: Write) -> None:
    good = write([5.0] * 12, name="a/b/good.log")
    reasons = {
        "empty.out": ([], None, "no Run: record"),
        "steps.out": ([1.0], None, "no Run: record"),
        "search.out": ([], RECORD | {"script": "load_model_no_fsdp.py"}, "does not train"),
        "lacks.out": ([], {"script": "train.py", "config": {}}, "lacks a field"),
        "strange.out": ([], RECORD | {"model": {"width": 3}}, "strange"),
    }
    for name, (speeds, record, _) in reasons.items():
        path = write(speeds, record, None, name=name)
        path.touch()
    path = good.parent / "notes.txt"
    path.write_text("not looked at")
    os.mkfifo(good.parent / "pipe.out")  # reading it would not end
    (good.parent / "folder.out").mkdir()
    assert len(find_logs(good.parents[2])) == 6
    runs, unusable = load_runs(good.parents[2])
    assert [run.path for run in runs] == [good]
    assert {path.name for path, _ in unusable} == set(reasons)
    for path, reason in unusable:
        assert reasons[path.name][2] in reason
    assert load_runs(good.parent / "absent") == ([], [])


STRANGE = (
    {"world_size": "8"}, {"world_size": 0}, {"num_nodes": -1}, {"commit": 3}, {"device": ["H200"]},
    {"peak_tflops": "nan"}, {"versions": {"torch": 2}}, {"global_batch": None},
    {"config": FLAGS | {"scaling_strategy": None}}, {"config": FLAGS | {"batch_size": []}},
    {"config": FLAGS | {"model_dtype": "\ud800"}}, {"model": asdict(SHAPE) | {"n_heads": 0}},
    {"model": asdict(SHAPE) | {"dim": 2**62}},
)  # fmt: skip


def test_strange_records_leave_a_log_out_and_no_traceback(write: Write) -> None:
    for number, changes in enumerate(STRANGE):
        write([5.0] * 12, RECORD | changes, name=f"run{number}.out")
    numbers = dict.fromkeys(("first_step", "num_steps", "num_kernels_per_step"), 1)
    seconds = dict.fromkeys(KINDS, 0.1)
    good = numbers | {"wall_s_per_step": 1.0, "seconds_per_step": seconds}
    breakdowns: list[dict[str, Any]] = [{}, good | {"first_step": "1"}, good | {"num_steps": -1}]
    breakdowns += [good | {"wall_s_per_step": 0}, good | {"seconds_per_step": {"loss": 1}}]
    for number, record in enumerate([*breakdowns, good]):
        path = write([5.0] * 12, name=f"breakdown{number}.out")
        path.write_text(f"{path.read_text()}Breakdown: {json.dumps(record)}\n")
    runs, unusable = load_runs(path.parent)
    assert [run.path for run in runs] == [path]
    assert len(unusable) == len(STRANGE) + len(breakdowns)
    assert all("lacks a field, or has a strange one: " in reason for _, reason in unusable)


def test_peak_memory_is_a_number_or_none(write: Write) -> None:
    for peak in ("x", [1], {}, None):
        record = RECORD | {"device_memory_gib": peak}
        how = mean_metrics(
            read_run(write([], record, END | {"peak_gib": peak}, name=f"{peak}.out"))
        )
        assert how.peak_gib is None and how.device_memory_gib is None


def test_two_runs_in_one_file_are_two_rows(write: Write) -> None:
    write([5.0] * 12)
    other = RECORD | {"config": FLAGS | {"batch_size": 4}}
    path = write([7.0] * 12, other)
    runs, unusable = load_runs(path.parent)
    assert unusable == []
    frame = table(runs)
    assert frame[["batch_size", "tokens_per_s"]].to_numpy().tolist() == [[3, 5], [4, 7]]


def test_table_of_nothing_and_of_failures(write: Write) -> None:
    assert len(pool(table([]))) == 0
    failed = read_run(write([], end={"status": "out_of_memory"}))
    frame = table([failed])
    assert frame["status"].item() == "out_of_memory"
    assert frame.dtypes["mfu_pct"] == frame.dtypes["peak_gib"] == "float64"
    assert pool(frame)["n"].item() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H100 80GB HBM3"},
        {"versions": {"torch": "2.12"}},
        {"compute_dtype": "float32"},
        {"world_size": 4},
        {"config": FLAGS | {"sequence_length": 2048}},
        {"config": FLAGS | {"packing": False}},
        {"config": FLAGS | {"model_dtype": "fp32"}},
    ],
)
def test_runs_that_differ_are_not_pooled(write: Write, change: dict[str, Any]) -> None:
    same = RECORD | {"config": FLAGS | {"set_seed": 1, "log_file": "y.out"}, "commit": "def"}
    records = [RECORD, same, RECORD | change]
    speeds = [[5.0] * 12, [7.0] * 12, [900.0] * 12]
    paths = [write(speeds[i], records[i], name=f"{i}.out") for i in range(3)]
    frame = table([read_run(path) for path in paths])
    pooled = pool(frame)
    assert sorted(pooled["n"]) == [1, 2]
    both = pooled[pooled["n"] == 2]
    assert both["tokens_per_s"].item() == 6.0
    assert (both["tokens_per_s_min"].item(), both["tokens_per_s_max"].item()) == (5.0, 7.0)
    assert both["num_steps"].item() == 4
    assert both["commit"].item() == "abc+, def+"
    assert both["log"].item() == f"{paths[0]}, {paths[1]}"
    assert set(CONFIGURATION) < set(pooled.columns)


def test_completed_and_killed_are_not_pooled(write: Write) -> None:
    runs = [read_run(write([5.0] * 12)), read_run(write([6.0] * 12, end=None, name="b.out"))]
    assert pool(table(runs))["n"].tolist() == [1, 1]


def test_many_logs_are_read_in_time(write: Write) -> None:
    """2,000 logs of 1,000 steps take less than 30 s; here 20, in the time of this process."""
    record = StepRecord(1, 11.1, 7774.49, 99.1, 40.1, 400.1, 1.2, 3e-6, 0.52, 54.3, 60.1)
    lines = [format_step(replace(record, step=step)) + "\n" for step in range(1, 1001)]
    first = write([], end=None)
    text = first.read_text() + "".join(lines)
    for number in range(20):
        (first.parent / f"{number}.out").write_text(text)
    first.unlink()
    started = time.process_time()
    runs, _ = load_runs(first.parent)
    frame = table(runs)
    seconds = time.process_time() - started
    assert frame["num_steps"].tolist() == [990] * 20
    assert seconds < 30 * len(runs) / 2000 * 2  # twice: a slow or a busy machine


def test_only_logged_steps_count(write: Write) -> None:
    """A hand-made RunLog, as the comparison of losses makes one, is summarized like a read one."""
    run = read_run(write([float(step) for step in range(1, 21)]))
    half = RunLog(run.path, steps=run.steps[10:15], runs=run.runs)
    assert mean_metrics(half, skip_steps=0).tokens_per_s == 13.0
