"""How do processes keep out of each other's way, and how does one end with another?"""

import ctypes
import errno
import fcntl
import os
import platform
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

LOCK_NAME = "writer.lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what such file systems answer
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TIED = """
import os, signal, sys, processes
processes.die_with_parent(int(sys.argv[1]), signal.SIGTERM)
os.execv(sys.argv[2], sys.argv[2:])
"""
_held: dict[Path, int] = {}  # descriptors of lock files: closing one unlocks


def lock_folder(folder: Path) -> None:
    """Make a folder, and keep other runs out of it until rank 0 has ended.

    Called again, it locks anew where the lock file was removed meanwhile. Raises ValueError, in
    one line, where another run has the folder (naming it), or where it cannot be locked. On a
    file system without locks nobody is kept out.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path not in _held or not _is_open_at(path, _held[path]):
            _held[path] = _open_locked(path)
    except OSError as error:
        raise ValueError(f"cannot lock {path} ({error.strerror}); use another folder") from None


def _is_open_at(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _open_locked(path: Path) -> int:
    # Through no link, and without waiting at a pipe.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        # Not flock: data workers, which are forks, would hold on to it when we are killed.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        job = f" (job {os.environ['SLURM_JOB_ID']})" if "SLURM_JOB_ID" in os.environ else ""
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}{job}".encode())
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace")
        os.close(descriptor)
        raise ValueError(
            f"{path.parent} is in use by {holder}; wait for its end, or use another folder"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            os.close(descriptor)
            raise
    return descriptor


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends, be it by kill -9 (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before
        sys.exit("the process that started this one has ended")


def tied(command: Sequence[str]) -> list[str]:
    """A command that is asked to stop when this process ends; to be run from the repository.

    By SIGTERM, which torchrun hands on to its ranks: were it killed, they would stay.
    """
    return [sys.executable, "-c", _TIED, str(os.getpid()), *command]
