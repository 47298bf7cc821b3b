"""Tokenizers and detokenizers: any text, any token ids, any steps; the reference is the `tokenizers` package."""

from __future__ import annotations

import functools

from engine_frames import Output, output_frame
from hypothesis import strategies as st
from trained_tokenizers import KINDS, TRAINING_TEXT, Pair, make_pair

from octavo import _core
from tests.fuzz.target import Case, Target, spliced

pair = functools.cache(make_pair)


def check_encoding(case: Case) -> None:
    """Case: a kind of tokenizer, and text."""
    made, text = pair(case["kind"]), case["text"]
    for special in (True, False):
        ids = made.ours.encode(text, add_special_tokens=special)
        assert ids == made.reference.encode(text, add_special_tokens=special).ids
        assert made.ours.encode_batch([text, "", text], add_special_tokens=special)[2] == ids
        assert made.ours.decode(ids) == made.reference.decode(ids, skip_special_tokens=False)


def check_stream(case: Case) -> None:
    """Case: a kind of tokenizer, prompt and output ids, in how many tokens a step they come, whether special tokens are
    skipped, stop strings."""
    made = pair(case["kind"])
    vocab_size = made.ours.vocab_size
    prompt = [i % vocab_size for i in case["prompt"]]
    ids = [i % vocab_size for i in case["ids"]] or [0]
    skip, stops = case["skip"], [stop for stop in case["stop"] if stop]
    text, finish = _stream(made, prompt, ids, case["steps"] or [1], skip, [])
    if not prompt:
        assert text == made.reference.decode(ids, skip_special_tokens=skip)
    assert finish == "length"
    assert text == _stream(made, prompt, ids, [1], skip, [])[0]
    stopped, finish = _stream(made, prompt, ids, case["steps"] or [1], skip, stops)
    first = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if first is None:
        assert (stopped, finish) == (text, "length")
    else:
        assert finish == "stop"
        assert not any(stop in stopped for stop in stops)
        assert text.startswith(stopped)
        assert len(stopped) < first


def _stream(
    made: Pair, prompt: list[int], ids: list[int], steps: list[int], skip: bool, stops: list[str]
) -> tuple[str, str | None]:
    """The text of all deltas, and how it ended."""
    core = _core.OutputProcessor(made.ours, [])
    core.add(
        1,
        n=1,
        prompt_token_ids=prompt,
        stop=stops,
        include_stop_str_in_output=False,
        skip_special_tokens=skip,
        detokenize=True,
    )
    text, finish, at, turn = "", None, 0, 0
    while at < len(ids) and finish is None:
        size = max(1, steps[turn % len(steps)])
        end = at + size >= len(ids)
        frame = core.process(output_frame([Output(1, ids[at : at + size], finish="length" if end else None)]))
        for delta in frame.deltas:
            text += delta.text
            finish = delta.finish_reason
        at, turn = at + size, turn + 1
    assert len(core) == 0
    return text, finish


IDS = st.lists(st.integers(0, 700), max_size=30)
ENCODING = Target(
    "encoding",
    check_encoding,
    lambda seeds: st.fixed_dictionaries(
        {
            "kind": st.sampled_from(sorted(KINDS)),
            "text": spliced([*TRAINING_TEXT.splitlines(), "<s>", "</s>", "<|im_end|>", "two words"]) | st.text(),
        }
    ),
)
STREAM = Target(
    "stream",
    check_stream,
    lambda seeds: st.fixed_dictionaries(
        {
            "kind": st.sampled_from(sorted(KINDS)),
            "prompt": IDS | st.just([]),
            "ids": IDS,
            "steps": st.lists(st.integers(1, 5), max_size=5),
            "skip": st.booleans(),
            "stop": st.lists(
                st.sampled_from(["a", " p", "st", "é", "\ufffd", ",", " ", "page", "🙂"]) | st.text(max_size=3),
                max_size=3,
            ),
        }
    ),
)
