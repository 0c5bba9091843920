"""How are tables of runs, and the words around them, written in Markdown?

The words stand in data/texts.md, each below its name; what the logs say is filled in. Those of a
table end with its header and, below it, the cells of a row.
"""

import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).resolve().parent / "data" / "texts.md"


class _Words(string.Formatter):
    """As str.format; n/a for what is not known, yes and no for what is so and what is not."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return as_text(value, format_spec)


def markdown_table(header: str, rows: Sequence[str]) -> str:
    """A table; columns are aligned right where every cell of theirs begins with a digit."""
    cells = (line.removeprefix("| ").removesuffix(" |").split(" | ") for line in (header, *rows))
    columns = list(zip(*cells, strict=False))  # a name that holds a bar costs no more than its row
    rules = ["--:" if all(cell[:1].isdigit() for cell in own) else "---" for _, *own in columns]
    return "\n".join([header, f"| {' | '.join(rules)} |", *rows])


def told(name: str, **values: Any) -> str:
    """The words of this name, with what the logs say filled in."""
    return _Words().format(_template(name), **values)


def _template(name: str) -> str:
    parts = re.split(r"<!-- (.+) -->\n", TEXTS.read_text("utf-8"))
    return parts[parts.index(name) + 1].strip()


def told_row(name: str, **values: Any) -> str:
    """A row of the table of this name."""
    return _Words().format(_template(name).rpartition("\n")[2], **values)


def told_tables(tables: Mapping[str, Sequence[str]], **values: Any) -> str:
    """Tables that have a row, each below its words."""
    parts = []
    for name, rows in tables.items():
        if rows:
            words = _Words().format(_template(name).rpartition("\n")[0], **values)
            *above, header = words.split("\n")
            parts.append("\n".join([*above, markdown_table(header, rows)]))
    return "\n\n".join(parts)


def as_text(value: Any, form: str) -> str:
    """The value as text; n/a where there is none."""
    return "n/a" if value is None or value != value else format(value, form)
