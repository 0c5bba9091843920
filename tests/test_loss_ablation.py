"""Does the comparison of runs find what it should, and does it refuse what it cannot judge?"""

import contextlib
import copy
import io
import itertools
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loss_ablation import AblationConfig, main
from parity import (
    FACTOR,
    PARITY_FIELDS,
    TABLE_HEAD,
    Comparison,
    compare,
    format_row,
    label_of,
    largest,
    worst,
)
from run_log import LogWriter, RunLog, StepRecord, read_run

ROOT = Path(__file__).resolve().parent.parent
SEED_LOGS = ROOT.parent / "shared" / "seed_logs"
STEPS = 20
NUM_PROJECTIONS = 4
PARAMETERS = {"embedding.weight": 4000, "blocks.0.norm.weight": 16, "head.weight": 2000}
RECORD: dict[str, Any] = {
    "schema": 1,
    "script": "train.py",
    "config": {
        "set_seed": 42,
        "sequence_length": 64,
        "packing": True,
        "scaling_strategy": "all",
        "scaling_factor": 1,
        "model_dtype": "fp32",
        "compute_dtype": None,
        "learning_rate": 1e-3,
        "lr_warmup_steps": 3,
        "grad_max_norm": 1.0,
        "batch_size": 8,
        "grad_accumulation_steps": 1,
        "activation_checkpointing": "none",
        "compile": False,
    },
    "fsdp": False,
    "commit": "0" * 40,
    "dirty": False,
    "versions": {"torch": "2.13.0", "python": "3.11", "cuda": None, "nccl": None},
    "device": "x86_64",
    "device_type": "cpu",
    "compute_dtype": "float32",
    "peak_tflops": None,
    "world_size": 1,
    "num_nodes": 1,
    "replicas": 1,
    "global_batch": 8,
    "tokens_per_step": 512,
    "num_parameters": 8655104,
    "flops_per_token": 52717056,
    "model": {"dim": 256, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "multiple_of": 256,
              "vocab_size": 512, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5,
              "rope_theta": 500000.0},
    "data": {"fingerprint": "4653e51ea137ee83", "num_documents": 1090},
    "tokenizer": {"name": "tokenizer.json", "vocab_size": 512},
    "slurm_job_id": None,
}  # fmt: skip


def set_place(record: dict[str, Any], place: str, value: Any) -> None:
    """Set a value at a dotted place of a record."""
    *folders, last = place.split(".")
    for key in folders:
        record = record[key]
    record[last] = value


def digest(error: float, seed: int, moved_share: float = 1.0) -> dict[str, Any]:
    """A digest of weights that moved by fixed vectors, but for a relative error of some seed."""
    parameters = {}
    for index, (name, numel) in enumerate(PARAMETERS.items()):
        vectors = np.random.default_rng([index, 1]).standard_normal((NUM_PROJECTIONS, numel))
        moved = np.random.default_rng([index, 2]).standard_normal(numel)
        noise = np.random.default_rng([index, 3, seed]).standard_normal(numel)
        change = moved + error * np.linalg.norm(moved) * noise / np.linalg.norm(noise)
        parameters[name] = {
            "projections": (vectors @ change).tolist(),
            "norm": float(np.linalg.norm(change)),
            "numel": numel,
        }
    shares = {"seed": 42, "num_projections": NUM_PROJECTIONS, "moved_share": moved_share}
    return {**shares, "parameters": parameters}


class Run:
    """A log to be written: a smooth training, changed as a test needs it."""

    def __init__(self, *, fsdp: bool = False, batch_size: int = 8, seed: int = 0) -> None:
        self.record = copy.deepcopy(RECORD)
        self.record["fsdp"] = fsdp
        self.record["script"] = "train_fsdp.py" if fsdp else "train.py"
        self.record["config"] |= {
            "batch_size": batch_size,
            "grad_accumulation_steps": 8 // batch_size,
        }
        self.seed = seed
        self.losses = {step: 6.0 - 0.05 * step for step in range(1, STEPS + 1)}
        self.grad_norms = {step: 2.0 + 0.1 * (step % 3) for step in range(1, STEPS + 1)}
        self.end: dict[str, Any] | None = {
            "status": "completed", "reason": "", "steps_done": STEPS, "seconds": {"total": 1.0},
            "digest": digest(1e-4, seed),
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        writer = LogWriter(path)
        with contextlib.redirect_stdout(io.StringIO()):
            writer.record("Run", self.record)
            for step, loss in self.losses.items():
                # Two real runs never take the same time.
                speed = 1000.0 + self.seed + step + 100 * self.record["fsdp"]
                norm = self.grad_norms[step]
                writer.step(StepRecord(step, loss, speed, 99.5, None, 0.05, norm, 1e-3, 0.5, 1.0))
            if self.end is not None:
                writer.record("End", self.end)
        writer.close()
        return path


@pytest.fixture
def references(tmp_path: Path) -> list[Path]:
    """Three references whose losses lie up to 2e-4 apart, and grad norms up to 2e-3."""
    paths = []
    for index, batch_size in enumerate((8, 4, 2)):
        run = Run(batch_size=batch_size, seed=index)
        for step in run.losses:
            run.losses[step] += (index - 1) * 1e-4 * (step >= 10)
            run.grad_norms[step] *= 1 + (index - 1) * 1e-3 * (step >= 10)
        paths.append(run.write(tmp_path / f"reference{index}.out"))
    return paths


def judge(paths: list[Path], references: list[Path]) -> Comparison:
    return compare([read_run(path) for path in paths], [read_run(path) for path in references])


def fsdp_run() -> Run:
    return Run(fsdp=True, batch_size=4, seed=9)


def test_a_run_inside_the_noise_is_equal(tmp_path: Path, references: list[Path]) -> None:
    comparison = judge([fsdp_run().write(tmp_path / "f.out")], references)
    assert (comparison.verdict, comparison.exit_status) == ("equal", 0), comparison.reason
    assert not comparison.notes
    floors = [gap.floor for gap in comparison.losses]
    assert max(floors[:9]) < 1e-5 < 1.9e-4 < min(floors[9:])
    assert floors[-1] == pytest.approx(2e-4)
    assert comparison.grad_norms[-1].floor == pytest.approx(2e-3, rel=1e-3)


def raise_loss(run: Run, amount: float) -> None:
    run.losses[15] += amount * 2e-4


def raise_grad_norm(run: Run, amount: float) -> None:
    run.grad_norms[15] *= 1 + amount * 2e-3


def change_weights(run: Run, amount: float) -> None:
    # The references' pairwise difference is √2 × 1e-4, below the precision √ε of AdamW's steps.
    assert run.end is not None
    run.end["digest"] = digest(amount * 2.0**-11.5, seed=9)


@pytest.mark.parametrize(
    ("change", "kind", "margin"),
    [(raise_loss, "loss", 0.1), (raise_grad_norm, "grad norm", 0.1),
     (change_weights, "final weights", 2.0)],
)  # fmt: skip
def test_the_limit_is_four_floors(
    change: Callable[[Run, float], None],
    kind: str,
    margin: float,
    tmp_path: Path,
    references: list[Path],
) -> None:
    verdicts = {}
    for amount in (FACTOR - margin, FACTOR + margin):
        run = fsdp_run()
        change(run, amount)
        comparison = judge([run.write(tmp_path / f"{amount}.out")], references)
        verdicts[comparison.verdict] = comparison
    assert list(verdicts) == ["equal", "not equal"]
    assert kind in verdicts["not equal"].reason
    assert verdicts["not equal"].exit_status == 1


def test_the_floor_only_grows(tmp_path: Path) -> None:
    paths = []
    for index, batch_size in enumerate((8, 4, 2)):
        run = Run(batch_size=batch_size, seed=index)
        run.losses[5] += index * 1e-3
        paths.append(run.write(tmp_path / f"{index}.out"))
    run = fsdp_run()
    run.losses[4] += 5e-4
    early = judge([run.write(tmp_path / "early.out")], paths)
    assert early.verdict == "not equal"
    assert "step 4" in early.reason
    run = fsdp_run()
    run.losses[18] += 5e-4
    assert judge([run.write(tmp_path / "late.out")], paths).verdict == "equal"


@settings(max_examples=40, deadline=None)
@given(
    losses=st.lists(st.floats(0.1, 12), min_size=3, max_size=6),
    shifts=st.lists(st.floats(0, 1e-2), min_size=4, max_size=4),
)
def test_floor_and_difference_as_defined(losses: list[float], shifts: list[float]) -> None:
    runs = []
    for index, shift in enumerate(shifts):
        record = copy.deepcopy(RECORD) | {"fsdp": index == 3}
        steps = [
            StepRecord(step, loss + shift * step, 1000.0 + index, 100.0, None, None, 1.0)
            for step, loss in enumerate(losses, start=1)
        ]
        runs.append(RunLog(Path(f"{index}.out"), steps=steps, runs=[record]))
    comparison = compare(runs[3:], runs[:3])
    for place, gap in enumerate(comparison.losses):
        values = [[run.steps[step].loss for run in runs] for step in range(place + 1)]
        pairs = [abs(a - b) for row in values for a, b in itertools.combinations(row[:3], 2)]
        assert gap.floor >= max(pairs)
        assert gap.floor <= max(*pairs, 1e-5 * max(1.0, abs(values[-1][0])))
        mean = sum(values[-1][:3]) / 3
        assert gap.difference == pytest.approx(abs(values[-1][3] - mean), abs=1e-9)


def test_without_measured_noise_the_precision_is_the_floor(
    tmp_path: Path, references: list[Path]
) -> None:
    comparison = judge([fsdp_run().write(tmp_path / "f.out")], references[:2])
    assert any("the precision is the floor" in note for note in comparison.notes)
    assert all(gap.floor < 2e-5 for gap in comparison.losses)
    # A gradient of one layer or of some rows that is wrong by a percent must not pass in fp32.
    assert all(FACTOR * gap.floor < 0.01 for gap in comparison.grad_norms)
    assert comparison.grad_norms[0].floor < 1e-5 < comparison.grad_norms[-1].floor


def test_bf16_is_judged_more_coarsely_but_not_blindly(tmp_path: Path) -> None:
    runs = [Run(), fsdp_run()]
    for run in runs:
        set_place(run.record, "config.model_dtype", "bf16")
        run.record["compute_dtype"] = "bfloat16"
        run.record["tokens_per_step"] = 32768
    reference, run = (run.write(tmp_path / f"{i}.out") for i, run in enumerate(runs))
    comparison = judge([run], [reference])
    assert comparison.verdict == "equal"
    # 2^-8 of the loss would be 0.02; the mean over 32768 tokens is known better.
    assert 1e-5 < comparison.losses[0].floor < 1e-3
    assert FACTOR * comparison.weights[0].floor == pytest.approx(0.25)


@pytest.mark.parametrize("place", PARITY_FIELDS.split())
def test_a_field_that_must_not_differ_is_named(
    place: str, tmp_path: Path, references: list[Path]
) -> None:
    run = fsdp_run()
    value: Any = {**RECORD["model"], "dim": 512} if place == "model" else "something else"
    if place == "config.model_dtype":
        value = "bf16"
    set_place(run.record, place, value)
    comparison = judge([run.write(tmp_path / "f.out")], references)
    assert (comparison.verdict, comparison.exit_status) == ("not comparable", 2)
    assert label_of(place) in comparison.reason
    assert len(comparison.mismatches) == 1


def test_references_must_match_each_other(tmp_path: Path, references: list[Path]) -> None:
    run = Run(batch_size=1, seed=5)
    run.record["config"]["set_seed"] = 43
    odd = run.write(tmp_path / "odd.out")
    comparison = judge([fsdp_run().write(tmp_path / "f.out")], [*references, odd])
    assert comparison.verdict == "not comparable"


def test_ranks_and_micro_batches_may_differ(tmp_path: Path, references: list[Path]) -> None:
    run = fsdp_run()
    run.record |= {"world_size": 4, "commit": "1" * 40, "replicas": 2}
    run.record["config"] |= {"batch_size": 1, "grad_accumulation_steps": 2, "cpu_offload": True}
    assert judge([run.write(tmp_path / "f.out")], references).verdict == "equal"


def test_one_wrong_parameter_is_found_and_named(tmp_path: Path, references: list[Path]) -> None:
    run = fsdp_run()
    assert run.end is not None
    # Too few weights to show in all together: one parameter's own floor finds it.
    run.end["digest"]["parameters"]["blocks.0.norm.weight"]["projections"] = [0.0] * 4
    comparison = judge([run.write(tmp_path / "f.out")], references)
    assert comparison.verdict == "not equal"
    assert "blocks.0.norm.weight" in comparison.reason


def test_weight_differences_are_estimated_from_projections(tmp_path: Path) -> None:
    run = fsdp_run()
    assert run.end is not None
    run.end["digest"] = digest(0.3, seed=7)
    reference = Run()
    assert reference.end is not None
    reference.end["digest"] = digest(0.0, seed=1)
    comparison = judge([run.write(tmp_path / "f.out")], [reference.write(tmp_path / "r.out")])
    # 12 random projections: the estimate has a relative standard deviation of 1/√24.
    assert comparison.weights[0].difference == pytest.approx(0.3, rel=0.6)
    assert worst(comparison.weights).ratio > 100


def test_a_weight_that_no_run_moved_is_no_difference(tmp_path: Path) -> None:
    runs = [Run(), fsdp_run()]
    for run in runs:
        assert run.end is not None
        still = run.end["digest"]["parameters"]["blocks.0.norm.weight"]
        still |= {"projections": [0.0] * NUM_PROJECTIONS, "norm": 0.0}
    reference, path = (run.write(tmp_path / f"{i}.out") for i, run in enumerate(runs))
    comparison = judge([path], [reference])
    assert comparison.verdict == "equal"
    assert comparison.weights[2].difference == 0


def test_few_moved_weights_prove_little(tmp_path: Path, references: list[Path]) -> None:
    run = fsdp_run()
    assert run.end is not None
    run.end["digest"]["moved_share"] = 0.16
    comparison = judge([run.write(tmp_path / "f.out")], references)
    assert comparison.moved_share == 0.16
    assert any("16 % of the weights" in note for note in comparison.notes)


def test_references_that_part_show_little(tmp_path: Path, references: list[Path]) -> None:
    run = Run(batch_size=2, seed=2)
    run.grad_norms[12] *= 4
    wide = [*references[:2], run.write(tmp_path / "wide.out")]
    path = fsdp_run().write(tmp_path / "f.out")
    assert judge([path], references).num_sharp == STEPS
    comparison = judge([path], wide)
    assert (comparison.verdict, comparison.num_sharp) == ("equal", 11)
    assert any("from step 12 on the floor is wider" in note for note in comparison.notes)
    assert "| 11 of 20 steps | equal |" in format_row("2 ranks", comparison)
    run.grad_norms[12] /= 4
    run.losses[14] += 0.1
    wide[2] = run.write(tmp_path / "other.out")
    assert judge([path], wide).num_sharp == 13


def test_a_reader_of_the_output_may_leave(tmp_path: Path, references: list[Path]) -> None:
    path = fsdp_run().write(tmp_path / "f.out")
    command = ["loss_ablation.py", "--fsdp-logs", path, "--no-fsdp-logs", *references]
    command += ["--output-dir", tmp_path]
    line = f"{shlex.join(map(str, [sys.executable, *command]))} | head -1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout and not done.stderr, done.stderr


@pytest.mark.parametrize("wrong_side", ["fsdp", "reference"])
def test_a_digest_without_numbers_is_not_equal(tmp_path: Path, wrong_side: str) -> None:
    run, other = fsdp_run(), fsdp_run()
    wrong = run if wrong_side == "fsdp" else other
    assert wrong.end is not None
    for row in wrong.end["digest"]["parameters"].values():
        row |= {"projections": ["nan"] * len(row["projections"]), "norm": "nan"}
    ours, theirs = run.write(tmp_path / "a.out"), other.write(tmp_path / "b.out")
    assert judge([ours], [theirs]).verdict == "not equal"


@pytest.mark.parametrize(
    "lacking", ["end", "digest", "same steps", "grad norm", "run record", "one field"]
)
def test_what_cannot_be_compared_is_not_called_equal(
    lacking: str, tmp_path: Path, references: list[Path]
) -> None:
    run = fsdp_run()
    assert run.end is not None
    if lacking == "end":
        run.end = None
    elif lacking == "digest":
        run.end["digest"] = None
    elif lacking == "same steps":
        run.end["steps_done"] = STEPS + 5
    path = run.write(tmp_path / "f.out")
    if lacking == "grad norm":
        text = path.read_text()
        path.write_text("".join(line.split(" | Grad norm")[0].rstrip("\n") + "\n"
                                for line in text.splitlines()))  # fmt: skip
    elif lacking == "run record":
        path.write_text(re.sub(r"Run: .*", "Run: {}", path.read_text()))
    elif lacking == "one field":
        path.write_text(path.read_text().replace('"set_seed"', '"seed_of_old"'))
    comparison = judge([path], references)
    assert (comparison.verdict, comparison.exit_status) == ("cannot tell", 4)


@pytest.mark.parametrize(("bad", "step"), [(math.nan, 7), (math.inf, 7), (math.nan, STEPS)])
def test_a_loss_that_is_no_number_is_not_equal(
    bad: float, step: int, tmp_path: Path, references: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run = fsdp_run()
    run.losses[step] = bad
    path = run.write(tmp_path / "f.out")
    status = main(AblationConfig(((path,),), (tuple(references),), tmp_path / "plots"))
    last_line = capfd.readouterr().out.splitlines()[-1]
    assert status == 1
    assert f"{bad} at step {step}" in last_line
    comparison = judge([path], references)
    assert largest(comparison.losses).step == step


def test_a_log_on_the_wrong_side_is_refused(tmp_path: Path, references: list[Path]) -> None:
    ours = fsdp_run().write(tmp_path / "fsdp.out")
    for fsdp, no_fsdp in ((references[0], references[1]), (ours, ours)):
        with pytest.raises(ValueError, match=r"with(out)? FSDP: wrong flag"):
            main(AblationConfig(((fsdp,),), ((no_fsdp,),), tmp_path / "plots"))
        assert not (tmp_path / "plots").exists()


def test_a_log_given_twice_is_no_second_reference(tmp_path: Path, references: list[Path]) -> None:
    path = fsdp_run().write(tmp_path / "f.out")
    comparison = judge([path], [references[0]] * 3)
    assert comparison.num_references == 1
    assert sum("given twice" in note for note in comparison.notes) == 2
    itself = judge([path], [path])
    assert any("both sides" in note for note in itself.notes)


def test_of_several_fsdp_runs_the_farthest_counts(tmp_path: Path, references: list[Path]) -> None:
    good, bad = fsdp_run(), fsdp_run()
    bad.seed = 10
    bad.losses[15] += 0.5
    paths = [good.write(tmp_path / "good.out"), bad.write(tmp_path / "bad.out")]
    comparison = judge(paths, references)
    assert comparison.verdict == "not equal"
    assert largest(comparison.losses).fsdp == pytest.approx(bad.losses[15])


def test_sides_that_were_swapped_are_told(tmp_path: Path, references: list[Path]) -> None:
    path = fsdp_run().write(tmp_path / "f.out")
    notes = judge(references[:1], [path]).notes
    assert sum("was given as" in note for note in notes) == 2


DAMAGES: dict[str, Callable[[list[bytes]], bytes]] = {
    "torn end": lambda lines: b"\n".join(lines) + b"\nStep: 21 | Loss: 4.9",
    "interleaved ranks": lambda lines: b"\n[rank3]: Traceback (most recent\n".join(lines) + b"\n",
    "CRLF": lambda lines: b"\r\n".join(lines) + b"\r\n",
    "ANSI colours": lambda lines: b"\n".join(b"\x1b[32m" + li + b"\x1b[0m" for li in lines) + b"\n",
    "not UTF-8": lambda lines: b"\xff\xfe\x80\n" + b"\n".join(lines) + b"\n\xc3\x28\n",
    "steps twice": lambda lines: b"\n".join([*lines[:-1], *lines[1:]]) + b"\n",
    "out of order": lambda lines: b"\n".join([lines[0], *lines[-2:0:-1], lines[-1]]) + b"\n",
    "timestamps": lambda lines: (
        b"\n".join(b"2025-05-21 00:59:26 INFO " + li for li in lines) + b"\n"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_logs_give_the_right_answer(
    damage: str, tmp_path: Path, references: list[Path]
) -> None:
    path = fsdp_run().write(tmp_path / "f.out")
    expected = judge([path], references)
    path.write_bytes(DAMAGES[damage](path.read_bytes().split(b"\n")[:-1]))
    found = judge([path], references)
    assert found.losses == expected.losses
    assert found.weights == expected.weights
    assert found.verdict == "equal"


def command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "loss_ablation.py", *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def no_common_steps(tmp_path: Path) -> Path:
    run = fsdp_run()
    run.losses = {step + 100: loss for step, loss in run.losses.items()}
    run.grad_norms = {step + 100: norm for step, norm in run.grad_norms.items()}
    return run.write(tmp_path / "late.out")


def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, references: list[Path]
) -> None:
    (tmp_path / "empty.out").touch()
    (tmp_path / "picture.out").write_bytes(bytes(range(256)) * 20)
    late = no_common_steps(tmp_path)
    cases = {
        "holds no steps": tmp_path / "empty.out",
        "is it a job log?": tmp_path / "picture.out",
        "cannot read the log": tmp_path / "missing.out",
        "no step in common": late,
    }
    for message, path in cases.items():
        done = command("--fsdp-logs", path, "--no-fsdp-logs", *references, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not done.stdout
    done = command("--fsdp-logs", references[0], cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no-fsdp-logs" in done.stderr
    assert not (tmp_path / "plots").exists()


def test_command_prints_sections_in_order_and_draws(tmp_path: Path, references: list[Path]) -> None:
    path = fsdp_run().write(tmp_path / "f.out")
    flags = [part for path in references for part in ("--no-fsdp-logs", path)]
    done = command("--fsdp-logs", path, *flags, "--output-dir", tmp_path / "plots")
    assert done.returncode == 0, done.stdout + done.stderr
    order = ["=== Compared Runs ===", "=== Max Loss Difference ===", "Step:", "Log FSDP Loss: ",
             "Log NO FSDP Loss: ", "Absolute Difference: 0.000000", "=== Mean Metrics ===",
             "tokens_per_sec:", "training_tokens_pct:", "mfu:", "tflops:", "10 common steps, 11 to",
             "note: micro-batches differ", "=== Grad Norm and Final Weights ===",
             "Verdict: EQUAL"]  # fmt: skip
    places = [done.stdout.index(text) for text in order]
    assert places == sorted(places)
    picture = (tmp_path / "plots" / "loss_comparison.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width = int.from_bytes(picture[16:20], "big")
    assert width >= 900


def test_runs_that_differ_are_marked_and_not_drawn(
    tmp_path: Path, references: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fsdp_run()
    run.record["config"]["set_seed"] = 43
    path = run.write(tmp_path / "f.out")
    status = main(AblationConfig(((path,),), (tuple(references),), tmp_path / "plots"))
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if "must not differ" in line]
    assert status == 2
    assert len(marked) == 1
    assert marked[0].startswith("set seed")
    assert not (tmp_path / "plots").exists()


def test_table_row_has_the_columns_of_its_head(tmp_path: Path, references: list[Path]) -> None:
    row = format_row("2 ranks", judge([fsdp_run().write(tmp_path / "f.out")], references))
    head, rule = TABLE_HEAD.splitlines()
    assert row.count("|") == head.count("|") == rule.count("|")
    assert row.endswith("| equal |")


@pytest.mark.skipif(not SEED_LOGS.is_dir(), reason="the older logs are not here")
def test_older_logs_print_the_published_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [SEED_LOGS / "loss_ablation_fsdp" / "lsai-454149.out",
             SEED_LOGS / "loss_ablation_no_fsdp" / "lsai-454162.out"]  # fmt: skip
    status = main(AblationConfig(((sides[0],),), ((sides[1],),), tmp_path))
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    expected = ["=== Max Loss Difference ===", "Step: 20", "Log FSDP Loss: 11.3200",
                "Log NO FSDP Loss: 11.3300", "Absolute Difference: 0.0100"]  # fmt: skip
    start = lines.index(expected[0])
    assert lines[start : start + 5] == expected
    start = lines.index("=== Mean Metrics ===")
    assert lines[start + 1 : start + 6] == [
        "all logged steps FSDP NO FSDP",
        "tokens_per_sec: 4814.07 7515.06",
        "training_tokens_pct: 27.98 23.94",
        "mfu: 6.08 39.16",
        "tflops: 60.09 387.34",
    ]
    assert "6.08" in lines[start + 6]
    assert "25.09 (248.12 TFLOPs)" in lines[start + 6]
    assert "0.01 can be seen" in lines[-1]
    assert status == 4
