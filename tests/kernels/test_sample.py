"""The sampling kernels without a GPU: tokens in Triton's interpreter, and compilation for an H200 (sm_90), each in its
own process: the choice between interpreter and compiler is made when kernels are imported."""

from __future__ import annotations

from case_files import CaseFile, CaseRun, runs


@runs(CaseFile("sample_cases.py"), CaseFile("sample_compile_cases.py", interpret=False))
def test_cases(case_run: CaseRun) -> None:
    assert case_run.passed, case_run.said
