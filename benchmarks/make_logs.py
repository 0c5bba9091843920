"""How do the benchmarks make their logs? Each once, in order: an interrupted series goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cli import flag_of
from processes import tied
from run_log import read_run

REPOSITORY = Path(__file__).resolve().parent.parent


def run_script(
    words: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None,
    log_flag: str = "--log-file", check: bool = False,
) -> str:  # fmt: skip
    """Run Python with these words, and the log as the last flag; how it ended, in words.

    It is asked to stop when we end.
    """
    command = [sys.executable, *words, log_flag, os.path.relpath(log, REPOSITORY)]
    done = subprocess.run(tied(command), cwd=REPOSITORY, env=os.environ | (environment or {}),
                          stdout=subprocess.DEVNULL, check=check)  # fmt: skip
    return f"status {done.returncode}"


def flags_of(config: object, names: str) -> list[str]:
    """Some fields of a config as flags of a script; those that are None are left out."""
    values = [(name, getattr(config, name)) for name in names.split()]
    return [word for name, v in values if v is not None for word in (flag_of(name), str(v))]


def make_logs(
    makers: Mapping[str, Callable[[Path], str]], folder: Path, *, max_minutes: float
) -> None:
    """Make each log that is not complete, and say how it went; start none after so long."""
    deadline = time.monotonic() + 60 * max_minutes
    for name, make in makers.items():
        log, started = folder / f"{name}.out", time.monotonic()
        is_done = log.is_file() and read_run(log).status in ("completed", "out_of_memory")
        if started < deadline and not is_done:
            log.unlink(missing_ok=True)
            how = make(log)
            print(f"{name}: {time.monotonic() - started:.0f} s, {how}", file=sys.stderr)
