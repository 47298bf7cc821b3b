"""The fixture by which tests run files of cases (case_files.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from case_files import CaseFile, CaseRun, CaseRuns


@pytest.fixture(scope="session")
def case_runs(request: pytest.FixtureRequest) -> Iterator[CaseRuns]:
    """Of all files that this session's tests ask for."""
    asked = [item.callspec.params.get("case_run") for item in request.session.items if hasattr(item, "callspec")]
    runs = CaseRuns([file for file in dict.fromkeys(asked) if isinstance(file, CaseFile)])
    yield runs
    runs.close()


@pytest.fixture
def case_run(request: pytest.FixtureRequest, case_runs: CaseRuns) -> CaseRun:
    """Of the file that the test names."""
    file: CaseFile = request.param
    return case_runs.outcome(file)
