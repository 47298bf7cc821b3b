"""Sampling in plain Python floats, one row at a time: slow, direct from the definitions, without any of Octavo's code.

`distribution` is the probability of every token under a request's parameters; the sampler must agree with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

FORBIDDEN = -1e30


def adjusted_logits(
    logits: Sequence[float], params: dict[str, Any], prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Logits after everything that comes before the temperature."""
    row = list(logits)
    tokens = [*prompt, *output]
    allowed = params.get("allowed_token_ids")
    if allowed is not None:
        row = [x if i in allowed else -math.inf for i, x in enumerate(row)]
    for word in params.get("bad_words_ids", ()):
        prefix = list(word[:-1])
        if not prefix or tokens[-len(prefix) :] == prefix:
            row[word[-1]] += FORBIDDEN
    if len(output) < params.get("min_tokens", 0):
        for token_id in {*params.get("eos_token_ids", ()), *params.get("stop_token_ids", ())}:
            row[token_id] += FORBIDDEN
    for token_id, bias in params.get("logit_bias", {}).items():
        row[int(token_id)] += bias
    repetition = params.get("repetition_penalty", 1.0)
    for token_id in set(tokens):
        row[token_id] = row[token_id] / repetition if row[token_id] > 0 else row[token_id] * repetition
    for token_id, count in Counter(output).items():
        row[token_id] -= params.get("frequency_penalty", 0.0) * count + params.get("presence_penalty", 0.0)
    return row


def softmax(row: Sequence[float]) -> list[float]:
    best = max(row)
    weights = [math.exp(x - best) for x in row]
    return [w / sum(weights) for w in weights]


def distribution(
    logits: Sequence[float], params: dict[str, Any], prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """Probabilities; all on one token when the temperature is 0."""
    row = adjusted_logits(logits, params, prompt, output)
    temperature = params.get("temperature", 1.0)
    if temperature < 1e-5:
        best = row.index(max(row))
        return [float(i == best) for i in range(len(row))]
    row = [x / temperature for x in row]
    ranked = sorted(range(len(row)), key=lambda i: -row[i])
    top_k = params.get("top_k", 0)
    kept = ranked[:top_k] if top_k > 0 else ranked
    probabilities = dict(zip(kept, softmax([row[i] for i in kept]), strict=True))
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= params.get("top_p", 1.0):
            break
        nucleus.append(i)
        mass += probabilities[i]
    floor = params.get("min_p", 0.0) * probabilities[kept[0]]
    nucleus = [i for i in nucleus if probabilities[i] >= floor]
    total = sum(probabilities[i] for i in nucleus)
    return [probabilities[i] / total if i in nucleus else 0.0 for i in range(len(row))]
