"""The `octavo` command, also as `python -m octavo`: Ctrl-C is no traceback, not even while modules are imported, nor is
a reader of its output that has seen enough (`| head`).
"""

import os
import select
import sys

INTERRUPTED = 130
UNREAD = 141


def main() -> int:
    """The exit code: the command's own, or as of a program that ended by SIGINT or SIGPIPE."""
    try:
        open_closed_streams()
        from octavo.cli import main as run

        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return UNREAD


def is_unread() -> bool:
    """Whether nobody reads the standard output any more; other pipes and sockets break, too."""
    ask = select.poll()
    ask.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in ask.poll(0))


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
