"""The `octavo` command, also as `python -m octavo`: Ctrl-C is no traceback, not even while modules are imported."""

import os
import sys

INTERRUPTED = 130


def main() -> int:
    """The exit code: the command's own, or 130 after Ctrl-C."""
    try:
        open_closed_streams()
        from octavo.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


def open_closed_streams() -> None:
    """Whoever starts the command may have closed its standard streams (`2>&-`): the next sockets would get their
    numbers, and what is said would go there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # as the streams are for the engine's process
            setattr(sys, name, os.fdopen(nowhere, mode))


if __name__ == "__main__":
    sys.exit(main())
