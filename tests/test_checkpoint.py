"""Does a run that was stopped, killed or moved to other ranks go on as if nothing had happened?"""

import contextlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint
from checkpoint import Progress, find_checkpoints, keep_newest, list_steps, read_checkpoint
from dataset import open_corpus
from processes import LOCK_NAME, lock_folder
from run_log import RunLog, read_run

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS = 20
COMMON = (
    "--tokenizer-name-or-path tests/data/tokenizer.json --sequence-length 64 --model-dtype fp32 "
    "--learning-rate 1e-3 --lr-warmup-steps 3 --logging-frequency 1 --deterministic"
).split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SLOW_S = 300  # bears a machine that is five times slower than an idle one


def start(folder: Path, ranks: int, flags: str) -> subprocess.Popen[str]:
    """train.py (0 ranks) or train_fsdp.py with its log and the hashes of its rows in a folder."""
    launch = [*TORCHRUN, str(ranks)] if ranks else [sys.executable]
    script = "train_fsdp.py" if ranks else "train.py"
    command = [*launch, "tests/hashing_train.py", str(folder / "rows"), script, *COMMON]
    command += ["--log-file", str(folder / "job.out"), *flags.split()]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit status, standard error)."""
    try:
        _, err = process.communicate(timeout=SLOW_S)
    except subprocess.TimeoutExpired:
        kill(process)
        pytest.fail(f"still running after {SLOW_S} s: {process.communicate()[1][-3000:]}")
    return process.returncode, err


def run(folder: Path, ranks: int, flags: str) -> str:
    """Run to the end; returns standard error."""
    code, err = finish(start(folder, ranks, flags))
    assert code == 0, err[-3000:]
    return err


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9 of a process and all that it started: torchrun's ranks have sessions of their own."""
    found = [process.pid]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> bool:
    """Whether a condition came true while the process ran."""
    deadline = time.monotonic() + SLOW_S
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def last_step(folder: Path) -> int:
    """Last step that any attempt has logged."""
    path = folder / "job.out"
    steps = read_run(path).steps if path.exists() else []
    return steps[-1].step if steps else 0


def rows_of(folder: Path) -> dict[tuple[int, int], str]:
    """(step, row) -> hash of its tokens; a step that was taken twice must have had the same."""
    found: dict[tuple[int, int], str] = {}
    for path in (folder / "rows").iterdir():
        for line in path.read_text().splitlines():
            step, row, digest = line.split()
            assert found.setdefault((int(step), int(row)), digest) == digest, line
    return found


def trace_of(log: RunLog) -> list[tuple[Any, ...]]:
    """What training computed at each step, to the last printed digit."""
    return [(step.step, step.loss, step.grad_norm, step.learning_rate) for step in log.steps]


def projections_of(log: RunLog) -> Any:
    """The final weights, as the digest tells them."""
    assert log.end is not None
    return log.end["digest"]["parameters"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.py without a checkpoint."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, 0, f"--batch-size 4 --training-steps {NUM_STEPS}")
    return folder


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.py, asked to stop twice over by each of two signals, then run to its end."""
    folder = tmp_path_factory.mktemp("preempted")
    flags = f"--batch-size 4 --training-steps {NUM_STEPS} --checkpoint-dir {folder / 'saved'}"
    for signal_number, after in ((signal.SIGTERM, 3), (signal.SIGUSR1, 9)):
        process = start(folder, 0, f"{flags} --keep 3 --checkpoint-every 4")
        assert wait_for(lambda after=after: last_step(folder) >= after, process)
        process.send_signal(signal_number)
        time.sleep(0.05)
        process.send_signal(signal_number)
        code, err = finish(process)
        assert code == 143 and "Traceback" not in err, err[-3000:]
        end = read_run(folder / "job.out").end
        assert end is not None and end["status"] == "preempted"
        [newest, *_] = list_steps(folder / "saved")
        assert read_checkpoint(newest).progress.step == end["steps_done"] < NUM_STEPS
    run(folder, 0, f"{flags} --keep 3 --checkpoint-every 4")
    return folder


def test_preempted_run_goes_on_bit_for_bit(preempted: Path, undisturbed: Path) -> None:
    ours, reference = read_run(preempted / "job.out"), read_run(undisturbed / "job.out")
    assert ours.status == "completed" and len(ours.runs) == 3
    assert trace_of(ours) == trace_of(reference) and len(ours.steps) == NUM_STEPS
    assert rows_of(preempted) == rows_of(undisturbed)
    assert projections_of(ours) == projections_of(reference)
    starts = [record["resumed_from_step"] for record in ours.runs]
    assert starts[0] is None and 3 <= starts[1] < starts[2] < NUM_STEPS
    assert ours.end is not None and {"save", "restore"} <= ours.end["seconds"].keys()
    assert ours.num_skipped_lines == 0 and ours.num_duplicate_steps == 0


def test_ranks_save_though_their_launcher_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third SIGTERM makes torchrun leave at once; the save takes longer than its grace."""
    monkeypatch.setenv("SAVE_DELAY_S", "9")
    flags = f"--batch-size 2 --training-steps 500 --checkpoint-dir {tmp_path / 'saved'}"
    process = start(tmp_path, 2, flags)
    assert wait_for(lambda: last_step(tmp_path) >= 3, process)
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    finish(process)
    deadline = time.monotonic() + SLOW_S
    while (log := read_run(tmp_path / "job.out")).end is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert log.end is not None and log.end["status"] == "preempted", log.end
    [folder] = list_steps(tmp_path / "saved")
    assert read_checkpoint(folder).progress.step == log.end["steps_done"]


def test_newest_checkpoints_are_kept_and_recorded(preempted: Path) -> None:
    names = [path.name for path in list_steps(preempted / "saved")]
    assert names == ["step-00000020", "step-00000016", "step-00000012"]
    assert sorted(os.listdir(preempted / "saved")) == [*names[::-1], LOCK_NAME]
    saves = read_run(preempted / "job.out").checkpoints
    assert [save["step"] for save in saves][-3:] == [12, 16, 20]
    num_bytes = sum(path.stat().st_size for path in (preempted / "saved" / names[0]).iterdir())
    assert saves[-1]["gib"] == pytest.approx(num_bytes / 2**30, abs=1e-4)
    assert all(0 < save["stopped_s"] < save["seconds"] for save in saves)


def test_run_that_is_done_stays_done(preempted: Path, tmp_path: Path) -> None:
    run(
        tmp_path,
        0,
        f"--batch-size 2 --grad-accumulation-steps 2 --training-steps {NUM_STEPS} "
        f"--checkpoint-dir {preempted / 'saved'}",
    )
    log = read_run(tmp_path / "job.out")
    assert log.status == "completed" and log.steps == [] and log.checkpoints == []
    assert log.end is not None and log.end["steps_done"] == NUM_STEPS
    assert projections_of(log) == projections_of(read_run(preempted / "job.out"))


def test_other_ranks_and_scripts_go_on(undisturbed: Path, tmp_path: Path) -> None:
    """2 -> 4 (two replicas) -> 1 rank, train.py -> 2 ranks offloaded: one global batch."""
    saved = tmp_path / "saved"
    attempts = (
        (2, "--batch-size 2 --training-steps 5"),
        (4, "--batch-size 1 --replicas 2 --training-steps 9"),
        (1, "--batch-size 2 --grad-accumulation-steps 2 --training-steps 12"),
        (0, "--batch-size 4 --training-steps 16"),
        (2, f"--batch-size 2 --cpu-offload --training-steps {NUM_STEPS}"),
    )
    reference = read_run(undisturbed / "job.out").steps
    first = 1
    for number, (ranks, flags) in enumerate(attempts):
        folder = tmp_path / str(number)
        run(folder, ranks, f"{flags} --checkpoint-dir {saved}")
        steps = read_run(folder / "job.out").steps
        assert steps[0].step == first
        for ours, theirs in zip(steps, reference[first - 1 :], strict=False):
            assert ours.step == theirs.step
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
        first = steps[-1].step + 1
        shutil.copytree(folder / "rows", tmp_path / "rows", dirs_exist_ok=True)
    assert first == NUM_STEPS + 1
    assert rows_of(tmp_path) == rows_of(undisturbed)


def kill_and_resume(tmp_path: Path, *, num_kills: int, ranks: int, seed: int = 0) -> None:
    """kill -9 by turns at a random moment and during a save; then run to the end and compare."""
    dice = random.Random(seed)
    num_steps = 8 * num_kills
    flags = f"--batch-size {4 // max(1, ranks)} --training-steps {num_steps}"
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    run(whole, ranks, flags)
    flags += f" --checkpoint-dir {hurt / 'saved'} --checkpoint-every 3"
    in_save = 0

    def saving_since(moment: float) -> bool:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            shards = (hurt / "saved").glob("*.partial/rank-*")
            return any(path.stat().st_mtime > moment for path in shards)
        return False

    for number in range(num_kills):
        before, started = last_step(hurt), time.time()
        process = start(hurt, ranks, flags)
        if number % 2:
            began = wait_for(lambda started=started: saving_since(started), process)
        else:
            began = wait_for(lambda before=before: last_step(hurt) > before, process)
            time.sleep(dice.random())
        kill(process)
        _, err = finish(process)
        assert began, err[-3000:]
        in_save += number % 2 and bool(list((hurt / "saved").glob("*.partial")))
    assert in_save, "no kill came during a save"
    run(hurt, ranks, flags)
    ours, reference = read_run(hurt / "job.out"), read_run(whole / "job.out")
    assert len(ours.runs) == num_kills + 1 and ours.status == "completed"
    assert trace_of(ours) == trace_of(reference) and len(ours.steps) == num_steps
    assert rows_of(hurt) == rows_of(whole)
    assert projections_of(ours) == projections_of(reference)
    assert max(record["resumed_from_step"] or 0 for record in ours.runs) > 0
    assert not list((hurt / "saved").glob("*.partial"))


def test_killed_three_times(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, num_kills=3, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [0, 2])
def test_killed_twenty_times(tmp_path: Path, ranks: int, seed: int) -> None:
    """In four runs of five kills: a test may not take longer than ten minutes."""
    kill_and_resume(tmp_path, num_kills=5, ranks=ranks, seed=seed)


def damage(folder: Path, kind: str) -> None:
    """Hurt a checkpoint in one way."""
    index, shards = folder / "checkpoint.json", folder / "rank-0.bin"
    content = json.loads(index.read_text())
    if kind == "no index":
        index.unlink()
    elif kind == "no shards":
        shards.unlink()
    elif kind == "cut shards":
        os.truncate(shards, shards.stat().st_size - 1)
    elif kind == "changed shards":
        with shards.open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"\x07" * 8)
    elif kind == "cut index":
        os.truncate(index, index.stat().st_size // 2)
    elif kind == "another position":
        content["content"]["progress"]["positions"][0][1] += 1
        index.write_text(json.dumps(content))
    elif kind == "no object":
        index.write_text("[1]")
    elif kind in FORGED:
        place, value = FORGED[kind]
        inside = content["content"]
        for name in place[:-1]:
            inside = inside[name]
        inside[place[-1]] = value
        content["crc32"] = checkpoint._checksum_of(content["content"])
        index.write_text(json.dumps(content))


FIRST_CHUNK = ("tensors", "model.embedding.weight", "chunks", 0)
# What no accident makes: the checksum fits.
FORGED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "a path outside": (("files",), {"../rank-0.bin": 1}),
    "a shard outside": ((*FIRST_CHUNK, "file"), "../../../../../../etc/passwd"),
    "no files": (("files",), {}),
    "step of text": (("progress", "step"), "20"),
    "step before the first": (("progress", "step"), -1),
    "positions of text": (("progress", "positions"), "00"),
    "position before the first": (("progress", "positions", 0, 1), -1),
    "no random state": (("progress", "random"), {}),  # found only when it is put back
}
DAMAGES = ("no index", "no shards", "cut shards", "cut index", "another position", "no object")


@pytest.fixture
def saved(preempted: Path, tmp_path: Path) -> Path:
    """A copy of a folder of checkpoints: steps 12, 16 and 20."""
    return Path(shutil.copytree(preempted / "saved", tmp_path / "saved"))


def identity_in(saved: Path) -> dict[str, Any]:
    return read_checkpoint(list_steps(saved)[0]).progress.identity


@pytest.mark.parametrize("kind", [*DAMAGES, *list(FORGED)[:-1]])
def test_damaged_checkpoint_is_skipped(saved: Path, kind: str, capsys: Any) -> None:
    identity = identity_in(saved)
    damage(saved / "step-00000020", kind)
    found = find_checkpoints(saved, "auto", identity, NUM_STEPS)
    assert [each.progress.step for each in found] == [16, 12]
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "step-00000020 is no whole checkpoint" in err
    with pytest.raises(ValueError, match="no whole checkpoint"):
        find_checkpoints(None, str(saved / "step-00000020"), identity, NUM_STEPS)


def test_shards_that_changed_are_noticed(saved: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Only reading tells; the run goes on from the one before, or anew where there is none."""
    reference = trace_of(read_run(undisturbed / "job.out"))
    flags = f"--batch-size 4 --training-steps {NUM_STEPS} --checkpoint-dir {saved}"
    damage(saved / "step-00000020", "changed shards")
    damage(saved / "step-00000016", "cut index")
    err = run(tmp_path / "one", 0, flags)
    log = read_run(tmp_path / "one" / "job.out")
    assert trace_of(log) == reference[12:]
    assert [record["resumed_from_step"] for record in log.runs] == [20, 12]
    assert len(err.splitlines()) == 2 and "rank-0.bin was changed" in err
    assert [path.name[-2:] for path in list_steps(saved)] == ["20", "16", "12"]
    damage(saved / "step-00000020", "no random state")
    damage(saved / "step-00000012", "changed shards")
    run(tmp_path / "all", 0, flags)
    assert trace_of(read_run(tmp_path / "all" / "job.out")) == reference


OTHER = {
    "set_seed": "--set-seed 7",
    "sequence_length": "--sequence-length 32",
    "packing": "--no-packing",
    "model_dtype": "--model-dtype bf16",
    "compute_dtype": "--compute-dtype bf16",
    "learning_rate": "--learning-rate 1e-4",
    "lr_warmup_steps": "--lr-warmup-steps 4",
    "grad_max_norm": "--grad-max-norm 2",
    "global_batch": "--batch-size 2",
    "model": "--scaling-factor 2",
    "data": "--dataset tests/data/ragged.parquet",
    "tokenizer": "--tokenizer-name-or-path tekken",
}


def test_other_run_is_refused(saved: Path) -> None:
    """Everything that decides the losses, one by one, by the function that the scripts call."""
    code = (
        "import sys; from train_config import *; from cli import parse_flags\n"
        "for flags in sys.stdin:\n"
        "    sys.argv = ['train.py', *flags.split()]\n"
        "    try: open_inputs(parse_flags(TrainConfig)); print('accepted')\n"
        "    except ValueError as error: print(str(error).split('of another run: ')[-1])\n"
    )
    common = f"{' '.join(COMMON)} --training-steps 30 --checkpoint-dir {saved}"
    lines = [f"{common} --batch-size 4 {flags}" for flags in ("", *OTHER.values())]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=SLOW_S,
    )
    accepted, *refused = done.stdout.splitlines()
    assert accepted == "accepted", done.stderr[-2000:]
    for name, message in zip(OTHER, refused, strict=True):
        named = [part.split(" (")[0] for part in message.split("), ") if " there, " in part]
        # The tokenizer's vocabulary is part of the model.
        assert name in named and set(named) <= {name, "model"}, (name, message)


BAD_INPUT = {
    "--resume nowhere": "auto, never, or the folder of a checkpoint, not nowhere",
    "--resume tests": "tests is no whole checkpoint",
    "--resume never": "step-00000020 is newer than step 0",
    "--resume SAVED/step-00000016": "step-00000020 is newer than step 16",
    "--set-seed 7": "is of another run: set_seed (42 there, 7 here)",
    "--training-steps 19": "step-00000020 is beyond --training-steps 19",
    "--keep 0": "--keep must be at least 1",
    "--checkpoint-every -1": "--checkpoint-every must not be negative",
    "--checkpoint-dir README.md/a": "README.md is no folder",
}


def test_bad_input_ends_with_one_line(saved: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in saved.rglob("*"))
    for flags, message in BAD_INPUT.items():
        words = flags.replace("SAVED", str(saved))
        common = f"--batch-size 4 --training-steps 30 --checkpoint-dir {saved}"
        code, err = finish(start(tmp_path / "never", 0, f"{common} {words}"))
        assert code == 2 and message in err, (flags, err)
        assert len(err.splitlines()) == 1, err
    assert not (tmp_path / "never" / "job.out").exists()
    assert sorted(path.name for path in saved.rglob("*")) == before


def test_save_that_fails_costs_no_training(tmp_path: Path, undisturbed: Path) -> None:
    """Where the folder was, stands a file; the run says so, and ends as it would have."""
    flags = f"--batch-size 4 --training-steps 4 --checkpoint-dir {tmp_path / 'saved'}"
    process = start(tmp_path, 0, f"{flags} --checkpoint-every 3")
    assert wait_for((tmp_path / "job.out").exists, process)
    (tmp_path / "saved").rename(tmp_path / "moved")
    (tmp_path / "saved").touch()
    code, err = finish(process)
    assert code == 0 and len(err.splitlines()) == 2, err
    assert "the checkpoint of step 3 was not saved: ValueError: cannot lock" in err
    log = read_run(tmp_path / "job.out")
    assert log.status == "completed" and log.checkpoints == []
    assert trace_of(log) == trace_of(read_run(undisturbed / "job.out"))[:4]


def test_one_run_at_a_time_saves_in_a_folder(tmp_path: Path) -> None:
    """The second is refused before it writes anything; a killed one is in nobody's way."""
    flags = f"--batch-size 4 --checkpoint-dir {tmp_path / 'saved'} --training-steps"
    first = start(tmp_path / "first", 0, f"{flags} 100000")
    try:
        assert wait_for(lambda: last_step(tmp_path / "first") >= 2, first)
        code, err = finish(start(tmp_path / "second", 0, f"{flags} 4"))
    finally:
        first.kill()  # not its data workers, which notice later
    assert code == 2 and len(err.splitlines()) == 1, err
    assert f"{tmp_path / 'saved'} is in use by process {first.pid} on " in err
    assert not (tmp_path / "second" / "job.out").exists()
    run(tmp_path / "third", 0, f"{flags} 4")
    assert read_run(tmp_path / "third" / "job.out").status == "completed"
    finish(first)


def test_a_folder_that_another_run_took_is_left_to_it(tmp_path: Path) -> None:
    """Moved away under a run on two ranks, and made anew by another: all say so and go on."""
    saved = tmp_path / "saved"
    flags = f"--batch-size 2 --training-steps 6 --checkpoint-dir {saved} --checkpoint-every 3"
    process = start(tmp_path, 2, flags)
    assert wait_for((saved / LOCK_NAME).exists, process)
    saved.rename(tmp_path / "moved")
    lock_folder(saved)
    code, err = finish(process)
    assert code == 0, err
    said = f"was not saved: ValueError: {saved} is in use by process {os.getpid()}"
    assert err.count(said) >= 2, err
    assert read_run(tmp_path / "job.out").status == "completed"
    assert list_steps(saved) == []


def test_one_checkpoint_by_name(saved: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Without a folder to save in, and from a step that is not the newest."""
    flags = f"--batch-size 4 --training-steps {NUM_STEPS} --resume {saved / 'step-00000016'}"
    run(tmp_path, 0, flags)
    reference = trace_of(read_run(undisturbed / "job.out"))
    assert trace_of(read_run(tmp_path / "job.out")) == reference[16:]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def tiny_progress(step: int) -> Progress:
    return Progress(step, [[0, 0]], step, {}, {"set_seed": 1})


def write_tiny(parent: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(30, 50), "b": torch.randn(7).bfloat16(), "none": torch.zeros(0, 4)}
    checkpoint.save(tensors, tensors, parent, tiny_progress(step), None)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Pickles in every place of a checkpoint, also where other formats keep theirs."""
    parent, mark = tmp_path / "saved", tmp_path / "boom"
    tensors = write_tiny(parent, 1)
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists()  # it would go off
    mark.unlink()
    folder = parent / "step-00000001"
    for name in (".metadata", "__0_0.distcp", "checkpoint.pt"):
        (folder / name).write_bytes(bomb)
    read = {name: torch.full_like(tensor, 9) for name, tensor in tensors.items()}
    checkpoint.load(read, read_checkpoint(folder), None)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    shards = folder / "rank-0.bin"
    shards.write_bytes(bomb.ljust(shards.stat().st_size, b"\0"))
    with pytest.raises(dcp.CheckpointException, match="was changed"):
        checkpoint.load(read, read_checkpoint(folder), None)
    (folder / "checkpoint.json").write_bytes(bomb)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        read_checkpoint(folder)
    assert not mark.exists()


def test_nothing_is_unpickled_from_a_dataset(tmp_path: Path) -> None:
    """An extension type of arrow could once carry a pickle in the schema of a parquet file."""
    mark = tmp_path / "boom"
    note = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Bomb(mark)),
    }
    field = pa.field("text", pa.string(), metadata=note)
    table = pa.table({"text": pa.array(["words"])}, schema=pa.schema([field]))
    pq.write_table(table, tmp_path / "a.parquet")
    assert open_corpus(str(tmp_path / "a.parquet")).num_documents == 1
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_keep_counts_whole_ones_only(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write_tiny(tmp_path, step)
    damage(tmp_path / "step-00000040", "no shards")
    keep_newest(tmp_path, 2, step=50)
    assert [path.name[-2:] for path in list_steps(tmp_path)] == ["50", "40", "30"]
    found = find_checkpoints(tmp_path, "auto", {"set_seed": 1}, 60)
    assert [each.progress.step for each in found] == [50, 30]
    assert find_checkpoints(tmp_path / "new", "auto", {}, 60) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_tiny(tmp_path, 10)
    damage(tmp_path / "step-00000010", "no index")
    write_tiny(tmp_path, 10)
    assert read_checkpoint(tmp_path / "step-00000010").progress == tiny_progress(10)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "writer.lock"]
