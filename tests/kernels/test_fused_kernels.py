"""Runs the cases of the fused decode kernels, each set in its own process: the choice between Triton's interpreter and
its compiler is made when kernels are imported."""

from __future__ import annotations

from case_files import CaseFile, CaseRun, runs


@runs(
    CaseFile("fused_numerics_cases.py"),
    CaseFile("fused_model_cases.py"),
    CaseFile("fused_compile_cases.py", interpret=False),
)
def test_cases(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said
