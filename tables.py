"""How are tables of runs, and the words around them, written in Markdown?

The words stand in data/texts.md, each below its name; what the logs say is filled in.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).resolve().parent / "data" / "texts.md"


def markdown_table(header: str, rows: Sequence[Sequence[str]]) -> str:
    """A table; columns are aligned right where every cell of theirs begins with a digit."""
    names = header.split(" | ")
    columns = zip(names, *rows, strict=True)
    rules = ["--:" if all(cell[:1].isdigit() for cell in cells) else "---" for _, *cells in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rules, *rows))


def told(name: str, **values: Any) -> str:
    """The words of this name, with what the logs say filled in."""
    parts = re.split(r"<!-- (.+) -->\n", TEXTS.read_text("utf-8"))
    return parts[parts.index(name) + 1].strip().format(**values)


def told_tables(tables: Mapping[str, Sequence[Sequence[str]]], **values: Any) -> str:
    """Tables that have a row, each below its words, which end with its header."""
    parts = []
    for name, rows in tables.items():
        if rows:
            words, _, header = told(name, **values).rpartition("\n")
            parts.append(f"{words}\n{markdown_table(header.strip('| '), rows)}")
    return "\n\n".join(parts)


def as_text(value: float | None, form: str) -> str:
    """The number as text; n/a where there is none."""
    return "n/a" if value is None or math.isnan(value) else format(value, form)
