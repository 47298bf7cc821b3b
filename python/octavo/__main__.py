"""The `octavo` command, also as `python -m octavo`: Ctrl-C is no traceback, not even while modules are imported."""

import sys

INTERRUPTED = 130


def main() -> int:
    """The exit code: the command's own, or 130 after Ctrl-C."""
    try:
        from octavo.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
