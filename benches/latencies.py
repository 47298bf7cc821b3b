"""What the clients of a load saw, as samples, percentiles, lines and a plot. Not here: the load itself (serve.py)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Result:
    """One request as the client saw it; times in seconds of `time.perf_counter`."""

    start_s: float
    request_id: str = ""
    due_s: float = 0.0
    """When it was to be sent."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    """When bytes with text came."""
    end_s: float = 0.0
    error: str = ""


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks; nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies_ms(results: list[Result]) -> dict[str, list[float]]:
    """Samples in milliseconds: time to first token, gaps between arrivals, time per output token, whole request."""
    samples: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    for result in results:
        first_s = result.arrivals_s[0]
        samples["ttft"].append((first_s - result.start_s) * 1000)
        samples["e2e"].append((result.end_s - result.start_s) * 1000)
        samples["itl"] += [(b - a) * 1000 for a, b in zip(result.arrivals_s, result.arrivals_s[1:], strict=False)]
        if result.num_output_tokens > 1:
            samples["tpot"].append((result.end_s - first_s) * 1000 / (result.num_output_tokens - 1))
    return samples


def summarize(results: list[Result], args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is reported, as plain data."""
    good = [result for result in results if not result.error and result.arrivals_s]
    failed = [result.error or "empty answer" for result in results if result.error or not result.arrivals_s]
    if not good:
        raise SystemExit(f"no request succeeded; the first error: {failed[0]}")
    wall_s = max(result.end_s for result in good) - min(result.start_s for result in good)
    num_output = sum(result.num_output_tokens for result in good)
    num_prompt = sum(result.num_prompt_tokens for result in good)
    summary: dict[str, Any] = {
        "num_requests": len(results),
        "num_failed": len(failed),
        "first_error": failed[0] if failed else None,
        "wall_s": wall_s,
        "requests_per_s": len(good) / wall_s,
        "prompt_tokens_per_s": num_prompt / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "num_output_tokens": num_output,
        "settings": {k: v for k, v in vars(args).items() if k != "api_key" and not isinstance(v, Path)},
    }
    for name, values in latencies_ms(good).items():
        summary[f"{name}_ms"] = {
            "mean": sum(values) / len(values) if values else float("nan"),
            **{f"p{p}": percentile(values, p) for p in PERCENTILES},
        }
    return summary


def show(summary: dict[str, Any]) -> str:
    """The summary as lines for people."""
    lines = [
        f"requests        {summary['num_requests']} ({summary['num_failed']} failed) in {summary['wall_s']:.2f} s, "
        f"{summary['requests_per_s']:.2f} a second",
        f"tokens a second {summary['output_tokens_per_s']:.0f} out, {summary['prompt_tokens_per_s']:.0f} in",
        f"{'ms':<8}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        lines.append(f"{name:<8}" + "".join(f"{value:>10.2f}" for value in summary[f"{name}_ms"].values()))
    for process, seconds in summary.get("cpu_s", {}).items():
        rate = summary["num_output_tokens"] / seconds if seconds else float("inf")
        lines.append(f"cpu {process:<12}{seconds:.2f} s, {rate:.0f} output tokens a CPU second")
    if summary["first_error"]:
        lines.append(f"first error: {summary['first_error']}")
    return "\n".join(lines)


def plot(results: list[Result], path: Path) -> None:
    """Distributions of the latencies, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = latencies_ms([result for result in results if not result.error and result.arrivals_s])
    figure, panels = pyplot.subplots(1, len(samples), figsize=(4 * len(samples), 3.2), layout="constrained")
    for panel, (name, values) in zip(panels, samples.items(), strict=True):
        ordered = sorted(values)
        panel.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        panel.set_title(name)
        panel.set_xlabel("ms")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of samples")
    figure.savefig(path, dpi=120)
