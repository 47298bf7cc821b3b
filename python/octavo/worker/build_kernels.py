"""The process that kernel_build.py starts: compiles the kernels of a model's steps (kernel_jobs.py) in forked
processes. It never touches the device.

Reads an order (JSON) from stdin. Writes the number of kernels that an engine needs to start, then the number of every
kernel that is done, a line each; those that the start needs have the lowest numbers.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.worker import triton_files
from octavo.worker.kernel_build import MAX_PROCESSES

if TYPE_CHECKING:
    from octavo.worker.kernel_jobs import Job

NICE = 10
NUM_BYTES = 2
"""Of a job's number in the pipe that the processes read."""


def start_processes(jobs: list[Job], first: int, processes: int) -> list[int]:
    """Forked processes that take the next job's number out of a pipe until there is none, and say (plus `first`) which
    are done; their ids."""
    numbers, write_end = os.pipe()
    os.write(write_end, b"".join(i.to_bytes(NUM_BYTES, "little") for i in range(len(jobs))))
    os.close(write_end)
    children = []
    for _ in range(min(processes, len(jobs))):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                while number := os.read(numbers, NUM_BYTES):
                    index = int.from_bytes(number, "little")
                    jobs[index]()
                    say(first + index)
                code = 0
            except BrokenPipeError:
                pass  # the engine has gone: nobody needs the other kernels
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    os.close(numbers)
    return children


def say(number: int) -> None:
    """A line on stdout, in one write."""
    os.write(1, f"{number}\n".encode())


def main() -> int:
    hashed = triton_files.start_hash()
    from octavo.worker import kernel_cache  # imports Triton
    from octavo.worker.kernel_jobs import Order, rounds_of_jobs  # imports torch

    order = Order.read(sys.stdin.read())
    hashed.join()
    kernel_cache.share()
    if order is None:
        say(0)
        return 0
    processes = max(1, min(order.device.num_cores - 2, MAX_PROCESSES))  # the engine is busy, too
    children: list[int] = []
    first = 0
    for jobs in rounds_of_jobs(order):
        if first == 0:
            say(len(jobs))
        else:  # the engine runs by now, perhaps
            os.nice(NICE)
            processes = (processes + 1) // 2
        children += start_processes(jobs, first, processes)
        first += len(jobs)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        return 1
    mark = Path(sys.argv[1])
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # as above
        sys.exit(1)
