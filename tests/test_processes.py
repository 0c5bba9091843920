"""Does a lock keep all others out of a folder, and does every doubt about it stop the run?"""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import checkpoint
import processes
from processes import LOCK_NAME, lock_folder
from utils import keep_from_forks

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 300
# Locks a folder, says so, and keeps it until its standard input ends.
OTHER = """
import sys
from pathlib import Path
from processes import lock_folder
try:
    lock_folder(Path(sys.argv[1]))
except ValueError as error:
    sys.exit(str(error))
print("locked", flush=True)
sys.stdin.read()
"""


def other(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(folder: Path) -> str:
    """What another process is told that wants the folder; empty where it gets it."""
    return other(folder).communicate(timeout=SLOW_S)[1].strip()


def save(folder: Path, step: int) -> None:
    tensors = {"a": torch.zeros(3)}
    progress = checkpoint.Progress(step, [[0, 0]], step, {}, {})
    checkpoint.save(tensors, tensors, folder, progress, None)


def fail(monkeypatch: pytest.MonkeyPatch, where: str, number: int) -> None:
    """Have the file system refuse the lock (``lockf``), or its file (``open``)."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr({"lockf": processes.fcntl, "open": processes.os}[where], where, refuse)


@pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP"])
def test_where_there_are_no_locks_the_run_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "lockf", getattr(errno, name))
    lock_folder(tmp_path / "saved")


@pytest.mark.parametrize("where", ["lockf", "open"])
def test_any_other_failure_stops_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EACCES", "EIO", "EROFS", "ENOSPC", "EMFILE"):
        number = getattr(errno, name)
        with monkeypatch.context() as patch:
            fail(patch, where, number)
            with pytest.raises(ValueError, match=f"cannot lock .*{os.strerror(number)}"):
                lock_folder(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_lock_file_of_another_user(tmp_path: Path) -> None:
    save(tmp_path / "saved", 1)
    (tmp_path / "saved" / LOCK_NAME).unlink(missing_ok=True)
    (tmp_path / "saved" / LOCK_NAME).touch(0o644)
    try:
        os.seteuid(65534)
        with pytest.raises(ValueError, match="Permission denied"):
            lock_folder(tmp_path / "saved")
    finally:
        os.seteuid(0)


def test_a_group_may_share_the_lock_file(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        lock_folder(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / LOCK_NAME).stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "dangling link"])
def test_what_is_no_regular_file_is_refused(kind: str, tmp_path: Path) -> None:
    path, victim = tmp_path / LOCK_NAME, tmp_path / "victim"
    victim.write_text("precious")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot lock"):
        lock_folder(tmp_path)
    assert victim.read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_the_second_is_told_who_was_first(tmp_path: Path) -> None:
    lock_folder(tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        lock_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    said = refusal(tmp_path)
    assert f"{tmp_path} is in use by process {os.getpid()} on " in said
    assert len(said.splitlines()) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_save_locks_anew_what_was_removed(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    lock_folder(folder)
    save(folder, 1)
    if what == "folder":
        shutil.rmtree(folder)
    else:
        (folder / LOCK_NAME).unlink()
    save(folder, 2)
    assert "is in use by" in refusal(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_is_saved_where_another_took_over(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    lock_folder(folder)
    save(folder, 1)
    shutil.rmtree(folder)
    taker = other(folder)
    assert taker.stdout is not None and taker.stdout.readline() == "locked\n"
    num_open = len(os.listdir("/proc/self/fd"))
    for step in (2, 3):
        with pytest.raises(dcp.CheckpointException) as said:
            save(folder, step)
        assert f"in use by process {taker.pid}" in checkpoint.reason_of(said.value)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
    taker.communicate(timeout=SLOW_S)
    save(folder, 4)  # it has ended
    assert [path.name for path in checkpoint.list_steps(folder)] == ["step-00000004"]


def test_memory_that_is_kept_from_forks_is_not_in_them() -> None:
    def size_in_fork() -> int:
        """Bytes of private memory that a fork of this process has."""
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, Path("/proc/self/statm").read_bytes())
            os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        with open(read, "rb") as pipe:
            return int(pipe.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    odd, large = torch.ones(3), torch.ones(2**26)  # 256 MiB
    before = size_in_fork()
    keep_from_forks([odd, large])
    gone = before - size_in_fork()
    assert abs(gone - large.nbytes) < 2**20
    assert large.sum() == 2**26 and odd.sum() == 3, "it is still here"
