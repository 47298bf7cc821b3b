"""Fuzzes for so many minutes: `python -m tests.fuzz --minutes 30`. Exit code 1 when something was found.

Targets take turns: those below in this process, and the property tests of rust/core (built with overflow checks) where
cargo is. Each turn has a fresh seed. A case that fails is made small, shown, and added to `tests/fuzz/corpus`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.table import TARGETS, examples

ROOT = Path(__file__).parents[2]
TURN_EXAMPLES = 200
# Tests of rust/core whose number of cases follows PROPTEST_CASES (256 when it is not set).
RUST_TESTS = ("frames", "detokenizer", "traces", "fairness", "tenants")
RUST_CASES = 512


def main() -> int:
    """Run turns until the time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first turn; default: from the clock")
    parser.add_argument("--only", choices=[*(target.name for target in TARGETS), "rust"], action="append")
    args = parser.parse_args()
    first = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 30)
    seed = first
    names = args.only or [*(target.name for target in TARGETS), *(["rust"] if shutil.which("cargo") else [])]
    until = time.monotonic() + 60 * args.minutes
    counts: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    failed: set[str] = set()
    while time.monotonic() < until and set(names) - failed:
        # The one that had the least time so far.
        name = min((name for name in names if name not in failed), key=lambda name: spent[name])
        start, seed = time.monotonic(), seed + 1
        if not (_rust_turn() if name == "rust" else _turn(name, seed)):
            failed.add(name)
        spent[name] += round(1000 * (time.monotonic() - start))
        counts[name] += RUST_CASES if name == "rust" else TURN_EXAMPLES
    for name in names:
        print(f"{name:12} {counts[name]:9} cases {spent[name] / 1000:7.0f} s {'FAILED' if name in failed else 'clean'}")
    print(f"--seed {first}; {len(failed)} failed")
    return 1 if failed else 0


def _turn(name: str, seed: int) -> bool:
    """Some cases of a target of this process; whether all went well."""
    target = next(target for target in TARGETS if target.name == name)
    try:
        examples(target, TURN_EXAMPLES, seed)
    except Exception:
        print(f"== {name} (seed {seed})", file=sys.stderr)
        traceback.print_exc()
        return False
    return True


def _rust_turn() -> bool:
    """The property tests of the core, with more cases than usual."""
    tests = [part for test in RUST_TESTS for part in ("--test", test)]
    command = ["cargo", "test", "--quiet", "--package", "octavo-core", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PROPTEST_CASES": str(RUST_CASES)}, capture_output=True, text=True
    )
    if done.returncode:
        print(f"== rust\n{done.stdout}\n{done.stderr}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
