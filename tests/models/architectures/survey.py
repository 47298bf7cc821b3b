"""Every architecture that the installed Transformers generates text with: does Octavo run it, which way, and rightly?

    python tests/models/architectures/survey.py             the whole table into RESULTS.md beside this file; minutes
    python tests/models/architectures/survey.py llama bloom  some model types, on the screen; --write: their rows too

Each is a tiny random model of its config class, saved and loaded, and compared with Transformers on a prompt that is
read at once, cut, and beside another row, then on greedy tokens; last in the whole engine, twice, the second time from
the prefix cache. Image-text models are given text. Exit code 1 when one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Llama4ForConditionalGeneration
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

from paged_driver import PagedDriver  # noqa: E402
from tiny import make_model, tiny_config  # noqa: E402
from tiny_models import load  # noqa: E402

from octavo import LLM, SamplingParams  # noqa: E402
from octavo.errors import ModelError  # noqa: E402

RESULTS = FOLDER / "RESULTS.md"
PROMPT_LEN, NUM_NEW, TOLERANCE = 40, 16, 2e-3
CUTS = (13, 14)
BLOCK_SIZE, NUM_CACHED = 8, 32
"""Of the engine; all blocks of a prompt but the one with its last token are found again."""
MAX_DETAIL = 240
WAYS = {
    "Decoder": "native",
    "VisionLanguage": "native",
    "Mamba2": "native",
    "TransformersModel": "packed",
    "TransformersRows": "rows",
}
"""Class of Octavo's model -> how it runs: own layers; Transformers on packed rows; Transformers row by row."""

KINDS: dict[str, dict[str, Any]] = {
    "causal": dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-text": dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`: native, packed, rows, refused, wrong, or untried (no tiny model could be made); `detail` says why, or
    what of a Transformers class is Octavo's."""

    kind: str
    model_type: str
    architecture: str
    status: str
    detail: str = ""


def entries(kind: str) -> list[tuple[str, str, str]]:
    """(kind, model type, class) of a mapping."""
    return [(kind, model_type, str(name)) for model_type, name in KINDS[kind].items()]


def examine(kind: str, model_type: str, architecture: str) -> Outcome:
    """Build, save, load, compare."""

    def outcome(status: str, detail: str = "") -> Outcome:
        return Outcome(kind, model_type, architecture, status, " ".join(detail.split())[:MAX_DETAIL])

    token_ids = torch.randint(3, 100, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
    try:
        model_class = getattr(transformers, architecture)
        reference = make_model(model_class, tiny_config(transformers.CONFIG_MAPPING[model_type], model_class))
    except Exception as error:  # foreign code that wants more than sizes
        return outcome("untried", f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        try:
            model = load(Path(folder))
        except ModelError as error:
            return outcome("refused", str(error))
        except Exception as error:  # it shall refuse in one line, not fail
            return outcome("wrong", f"{type(error).__name__}: {error}")
        try:
            expected, tokens = logits_of(reference, token_ids), greedy_tokens(reference, token_ids)
        except Exception as error:  # it wants images, which Octavo should have known
            return outcome("wrong", f"runs, but Transformers does not: {type(error).__name__}: {error}")
        problem = compare(model, token_ids, expected, tokens)
        try:
            problem = problem or engine_difference(folder, token_ids, tokens)
        except Exception as error:  # the engine shall end a request, not raise
            problem = f"in the engine: {type(error).__name__}: {error}"
    if problem:
        return outcome("wrong", problem)
    return outcome(WAYS[type(model).__name__], str(getattr(model, "replaced", "")))


def logits_of(reference: Any, token_ids: list[int]) -> Tensor:
    """Transformers' logits [t, v], without a cache; of Llama 4, whose class can't be given text alone, by the causal LM
    in it."""
    reference = reference.language_model if isinstance(reference, Llama4ForConditionalGeneration) else reference
    with torch.inference_mode():
        logits: Tensor = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def greedy_tokens(reference: Any, token_ids: list[int]) -> list[int]:
    """Transformers' next `NUM_NEW` tokens, each from the whole sequence."""
    sequence = list(token_ids)
    for _ in range(NUM_NEW):
        sequence.append(int(logits_of(reference, sequence)[-1].argmax()))
    return sequence[len(token_ids) :]


def compare(model: Any, token_ids: list[int], expected: Tensor, tokens: list[int]) -> str:
    """What differs; empty when nothing does."""
    whole = PagedDriver(model, seed=1).step([(0, token_ids)])
    driver = PagedDriver(model, seed=2)
    parts = [part.tolist() for part in torch.tensor(token_ids).tensor_split(CUTS)]
    cut = torch.cat([driver.step([(1, part)]) for part in parts])
    driver = PagedDriver(model, seed=3, block_size=4)
    driver.step([(2, token_ids[5:20])])
    beside = driver.step([(2, token_ids[20:21]), (3, token_ids)])[1:]
    for name, found in (("at once", whole), ("cut", cut), ("beside another row", beside)):
        error = (found - expected).abs().max().item()
        if not error <= TOLERANCE:
            return f"read {name}: logits differ by {error:.1e}"
    driver, new = PagedDriver(model, seed=4), token_ids
    for i, best in enumerate(tokens):
        new = [int(driver.step([(0, new)])[-1].argmax())]
        if new != [best]:
            return f"greedy token {i} is {new[0]}, not {best}"
    return ""


def engine_difference(folder: str, token_ids: list[int], tokens: list[int]) -> str:
    """What differs in the engine when a prompt is sent twice, of its tokens or of those that come from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
    with LLM(
        folder,
        dtype="float32",
        runner="torch",
        block_size=BLOCK_SIZE,
        max_model_len=64,
        num_gpu_blocks_override=96,
        max_num_seqs=2,
        max_num_batched_tokens=48,
        cpu_threads=1,
    ) as llm:
        for name, num_cached in (("first", 0), ("from the prefix cache", NUM_CACHED)):
            (output,) = llm.generate([token_ids], params, use_tqdm=False)
            if output.outputs[0].token_ids != tokens:
                return f"in the engine, {name}: tokens {output.outputs[0].token_ids}, not {tokens}"
            if output.num_cached_tokens != num_cached:
                return f"in the engine, {name}: {output.num_cached_tokens} tokens from the cache, not {num_cached}"
    return ""


def write_table(outcomes: list[Outcome]) -> None:
    """RESULTS.md."""
    lines = [
        f"# Architectures of Transformers {transformers.__version__}, as tiny random models",
        "",
        "`native`: Octavo's layers. `packed`: Transformers' class on packed rows with Octavo's paged attention.",
        "`rows`: Transformers' class and cache, row by row. `refused`: one clear line before loading.",
        "`untried`: no tiny model could be made. Of `packed` and `rows` the last column says what of the class was",
        "replaced by Octavo's layers, and which norms and MLPs were not, with the reason.",
        "Image-text models are given text. Written by `python tests/models/architectures/survey.py`.",
    ]
    for kind in KINDS:
        found = [outcome for outcome in outcomes if outcome.kind == kind]
        lines += [
            "",
            f"## {kind}: {summary(found)}",
            "",
            "| model type | class | status | why, or what is Octavo's |",
            "|---|---|---|---|",
        ]
        lines += [f"| {o.model_type} | {o.architecture} | {o.status} | {o.detail.replace('|', '/')} |" for o in found]
    RESULTS.write_text("\n".join(lines) + "\n")


def summary(outcomes: list[Outcome]) -> str:
    """ "150 of 196 run (…)"."""
    counts = Counter(outcome.status for outcome in outcomes)
    runs = sum(counts[way] for way in set(WAYS.values()))
    return f"{runs} of {len(outcomes)} run ({', '.join(f'{count} {name}' for name, count in counts.most_common())})"


def read_outcomes() -> list[Outcome]:
    """The rows of RESULTS.md."""
    found, kind = [], ""
    for line in RESULTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("## "):
            kind = line[3:].split(":")[0]
        elif len(cells) == 6 and cells[3] in (*WAYS.values(), "refused", "untried", "wrong"):
            found.append(Outcome(kind, *cells[1:5]))
    return found


def read_table() -> dict[tuple[str, str], str]:
    """(kind, model type) -> status, of RESULTS.md."""
    return {(outcome.kind, outcome.model_type): outcome.status for outcome in read_outcomes()}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model_types", nargs="*", help="only these")
    parser.add_argument("--write", action="store_true", help="write the table's rows of these")
    arguments = parser.parse_args()
    wanted = arguments.model_types
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = []
    for entry in [*entries("causal"), *entries("image-text")]:
        if not wanted or entry[1] in wanted:
            outcomes.append(examine(*entry))
            print(f"{entry[0]:11}{entry[1]:28}{outcomes[-1].status:9}{outcomes[-1].detail}", flush=True)
    if arguments.write or not wanted:
        new = {(outcome.kind, outcome.model_type): outcome for outcome in outcomes}
        known = read_outcomes() if wanted else outcomes
        write_table([new.get((outcome.kind, outcome.model_type), outcome) for outcome in known])
    for kind in KINDS:
        print(f"{kind}: {summary([outcome for outcome in outcomes if outcome.kind == kind])}")
    return int(any(outcome.status == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
