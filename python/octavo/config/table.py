"""The table of options in python/octavo/README.md; `python -m octavo.config` prints it."""

from __future__ import annotations

from octavo.config.options import engine_options, section_options


def options_markdown() -> str:
    """The table: one row a field, in the order of the tree."""
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for opt in (*engine_options(), *section_options("server")):
        if opt.name == "model":
            continue
        shown = "" if opt.default in (None, []) else f"`{opt.default}`"
        choices = f" One of {', '.join(opt.choices)}." if opt.choices else ""
        lines.append(f"| `{opt.flag}` | {shown} | {opt.help}{choices} |")
    return "\n".join(lines)
