"""The targets, and how one is fed so many cases."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.target import Case, Target

# Helpers of the other tests, which pytest finds by itself.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("server", "server/tools", "text", "core")]

from tests.fuzz import bodies, constraints, frames, parsers, text  # noqa: E402

TARGETS = [bodies.TARGET, constraints.TARGET, frames.TARGET, parsers.TARGET, text.ENCODING, text.STREAM]


def examples(target: Target, count: int, seed: int) -> None:
    """Feed it so many fresh cases; the first one that fails is made small, kept in the corpus, and raises."""
    last: list[Case] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(target.cases(target.seeds()))
    def run(case: Case) -> None:
        try:
            target.check(case)
        except BaseException:
            last[:] = [case]
            raise

    try:
        run()
    except BaseException:
        if last:
            target.keep(last[0])
        raise
