"""Counts how the grammar of every schema in the corpus judges every value, against the `jsonschema` package.

    python -m tests.grammar.conformance

`wrong` (a value that violates the schema is accepted) must be 0. `narrow`: a valid value that the grammar does not
write: properties in another order, 1.0 for an integer, whitespace.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from tests.grammar.corpus import CORPUS, VALUES
from tests.grammar.driver import Driver, accepted, spell

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@dataclass
class Verdict:
    """What became of one schema."""

    keyword: str
    schema: Any
    refusal: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)


def is_valid(schema: Any, text: str) -> bool:
    """Whether the JSON text satisfies the schema, formats included."""
    is_older = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    draft = jsonschema.Draft201909Validator if is_older else jsonschema.Draft202012Validator
    validator = draft(schema, format_checker=CHECKER)
    return bool(validator.is_valid(json.loads(text)))


def write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def judge(driver: Driver, keyword: str, schema: Any, extra: list[Any]) -> Verdict:
    """Try all values on one schema."""
    verdict = Verdict(keyword, schema)
    if schema is False:
        verdict.refusal = "nothing satisfies it"
        return verdict
    texts = list(dict.fromkeys(write(value) for value in [*extra, *VALUES]))
    rows = driver.run([({"json": schema}, spell(text)) for text in texts])
    verdict.refusal = rows[0].refusal
    if verdict.refusal is not None:
        return verdict
    for text, row in zip(texts, rows, strict=True):
        valid, taken = is_valid(schema, text), accepted(row, text)
        name = "pass" if valid == taken else "wrong" if taken else "narrow"
        verdict.counts[name] += 1
        if name != "pass":
            getattr(verdict, name).append(text)
    return verdict


def verdicts(folder: Path) -> Iterator[Verdict]:
    driver = Driver(folder, num_rows=64, max_tokens=256)
    for keyword, entries in CORPUS.items():
        for schema, extra in entries:
            yield judge(driver, keyword, schema, extra)


def main() -> None:
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for verdict in verdicts(Path(folder)):
            total["schemas"] += 1
            total["refused"] += verdict.refusal is not None
            total.update(verdict.counts)
            schema = write(verdict.schema)[:100]
            if verdict.refusal is not None:
                print(f"refused  {schema}: {verdict.refusal}")
            for kind in ("wrong", "narrow"):
                if getattr(verdict, kind):
                    print(f"{kind:8} {schema}: {' '.join(getattr(verdict, kind))[:200]}")
    print(", ".join(f"{count} {name}" for name, count in total.items()))


if __name__ == "__main__":
    main()
