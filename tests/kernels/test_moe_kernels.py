"""Runs the cases of the kernels of mixtures of experts, each set in its own process: the choice between Triton's
interpreter and its compiler is made when kernels are imported."""

from __future__ import annotations

from case_files import CaseFile, CaseRun, runs


@runs(CaseFile("moe_cases.py"), CaseFile("moe_compile_cases.py", interpret=False))
def test_cases(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said
