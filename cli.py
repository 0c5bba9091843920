"""How do the scripts read their flags, and how do they refuse bad input?

Flags are the fields of a frozen dataclass, read by tyro: the field docstrings are ``--help``.
What a user did wrong is a ValueError; it ends as one line on standard error, exit status 2.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import tyro

Config = TypeVar("Config")
EXIT_BAD_INPUT = 2


def parse_flags(config_class: type[Config]) -> Config:
    """Read ``sys.argv`` into a config; a bad flag ends the process with one line, status 2."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(config_class)
    except SystemExit as exit_request:
        if exit_request.code in (None, 0):  # --help
            raise
    refuse(f"{_first_paragraph(box.getvalue())} (see --help)")


def flag_of(field_name: str) -> str:
    """How a field of a config is given."""
    return "--" + field_name.replace("_", "-")


def check_flags(config: object, names: str, must: str, holds: Callable[[Any], bool]) -> None:
    """Raise ValueError for the first of these fields whose value does not hold."""
    for name in names.split():
        if not holds(value := getattr(config, name)):
            raise ValueError(f"{flag_of(name)} must {must}, not {value}")


def refuse(message: object) -> NoReturn:
    """Print one line that says what is wrong, from one rank, and exit with status 2."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        # Rank 0 has usually found the same and its launcher ends us while we wait here; what only
        # this rank sees (a file missing on its node) must still be said.
        time.sleep(15)  # a loaded machine starts its ranks seconds apart
    line = " ".join(str(message).split())
    print(f"{os.path.basename(sys.argv[0])}: error: {line}", file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)


def _first_paragraph(box: str) -> str:
    """The message inside the box that tyro draws around an error."""
    lines: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip("│╰╯ ")
        if not text.strip("─ "):
            break
        lines.append(text)
    message = " ".join(lines)
    # Of a flag, tyro's words name it; of a check in __post_init__ they name only our class.
    is_check = message.startswith("Error parsing ") and not message.startswith("Error parsing --")
    return message.split(": ", 1)[1] if is_check else message
