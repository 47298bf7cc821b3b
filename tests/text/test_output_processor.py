"""Frames to text: incremental text against decoding all ids, stop strings against a search in the whole text."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import pytest
from engine_frames import STATS, VERSION, Output, hello_frame, output_frame, reply_frame
from trained_tokenizers import TRAINING_TEXT, Pair

from octavo import _core

DEFAULTS: dict[str, Any] = {
    "n": 1,
    "prompt_token_ids": [],
    "stop": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "detokenize": True,
}


def processor(pair: Pair | None, eos: list[int] | None = None) -> _core.OutputProcessor:
    return _core.OutputProcessor(pair.ours if pair else None, eos or [])


def cut(r: random.Random, ids: list[int]) -> list[list[int]]:
    """The ids in runs of 1 to 3, as steps would give them."""
    runs = []
    while ids:
        count = r.randrange(1, 4)
        runs.append(ids[:count])
        ids = ids[count:]
    return runs


def random_ids(r: random.Random, pair: Pair) -> list[int]:
    if r.random() < 0.3:
        return [r.randrange(pair.ours.vocab_size) for _ in range(r.randrange(1, 20))]
    start = r.randrange(len(TRAINING_TEXT) - 60)
    return pair.ours.encode(TRAINING_TEXT[start : start + 60] + "🤖ß", add_special_tokens=False)


def run(
    core: _core.OutputProcessor, request_id: int, runs: list[list[int]], finish: str | None = "length"
) -> list[_core.Delta]:
    """The deltas of one sequence that gets these ids, one run a frame."""
    deltas: list[_core.Delta] = []
    for at, ids in enumerate(runs):
        is_last = at == len(runs) - 1
        deltas += core.process(output_frame([Output(request_id, ids, finish=finish if is_last else None)])).deltas
    return deltas


@pytest.mark.parametrize("skip", [True, False])
def test_deltas_joined_are_the_whole_text(pair: Pair, skip: bool) -> None:
    """Forty sequences at once, a random number of tokens each step."""
    r = random.Random(5)
    core = processor(pair)
    wanted = {}
    pending: dict[int, list[list[int]]] = {}
    for request_id in range(40):
        ids = random_ids(r, pair)
        wanted[request_id] = (ids, pair.reference.decode(ids, skip_special_tokens=skip))
        pending[request_id] = cut(r, ids)
        core.add(request_id, **DEFAULTS | {"skip_special_tokens": skip})
    got: dict[int, tuple[list[int], str]] = {request_id: ([], "") for request_id in wanted}
    while pending:
        outputs = []
        for request_id in r.sample(sorted(pending), k=r.randrange(1, len(pending) + 1)):
            ids = pending[request_id].pop(0)
            outputs.append(Output(request_id, ids, finish=None if pending[request_id] else "length"))
            if not pending[request_id]:
                del pending[request_id]
        for delta in core.process(output_frame(outputs)).deltas:
            ids, text = got[delta.request_id]
            got[delta.request_id] = (ids + delta.token_ids, text + delta.text)
            assert delta.index == 0
            assert delta.finish_reason == (None if delta.request_id in pending else "length")
    assert got == wanted
    assert len(core) == 0


def test_text_goes_on_after_the_prompt(pairs: dict[str, Pair]) -> None:
    """A blank between prompt and output is part of the output, as in decoding both together."""
    for kind in ("byte_level", "sentencepiece_bpe", "unigram"):
        pair = pairs[kind]
        ids = pair.ours.encode("two sequences share a page", add_special_tokens=False)
        for at in range(1, len(ids)):
            core = processor(pair)
            core.add(1, **DEFAULTS | {"prompt_token_ids": ids[:at]})
            text = "".join(delta.text for delta in run(core, 1, [[i] for i in ids[at:]]))
            assert pair.ours.decode(ids[:at]) + text == "two sequences share a page"


def test_half_characters_wait(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    ids = [pair.ours.token_to_id(token) for token in "ðŁĻĤ"]
    assert None not in ids
    core = processor(pair)
    core.add(1, **DEFAULTS)
    assert [delta.text for delta in run(core, 1, [[i] for i in ids])] == ["", "", "", "🙂"]
    core.add(2, **DEFAULTS)
    assert [delta.text for delta in run(core, 2, [[i] for i in ids[:2]])] == ["", "\ufffd"]


def search(texts: list[str], stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """The shown text, the stop string and the number of tokens, given what each token adds."""
    whole = ""
    for count, text in enumerate(texts, start=1):
        for char in text:
            whole += char
            found = max((stop for stop in stops if whole.endswith(stop)), key=len, default=None)
            if found is not None:
                return (whole if include else whole[: len(whole) - len(found)]), found, count
    return whole, None, len(texts)


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_are_found_wherever_they_lie(pair: Pair, include: bool) -> None:
    r = random.Random(6)
    num_found = 0
    for _ in range(150):
        ids = random_ids(r, pair)
        plain = processor(pair)
        plain.add(1, **DEFAULTS)
        texts = [delta.text for delta in run(plain, 1, [[i] for i in ids])]
        whole = "".join(texts)
        stops = []
        for _ in range(r.randrange(1, 4)):
            start = r.randrange(len(whole) + 1)
            stops.append(whole[start : start + r.randrange(1, 9)] + r.choice(["", "", "~"]) or "~")
        text, stop, count = search(texts, stops, include)
        core = processor(pair)
        core.add(1, **DEFAULTS | {"stop": stops, "include_stop_str_in_output": include})
        deltas = run(core, 1, cut(r, ids))
        shown = ""
        for delta in deltas:
            shown += delta.text
            assert text.startswith(shown)
        assert (shown, deltas[-1].stop_reason) == (text, stop)
        assert [i for delta in deltas for i in delta.token_ids] == ids[:count]
        assert deltas[-1].finish_reason == ("length" if stop is None else "stop")
        assert len(core) == 0
        num_found += stop is not None
    assert 50 < num_found < 150


def test_a_stop_string_ends_its_sequence_only(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    letter = {char: pair.ours.token_to_id(char) for char in "abEND"}
    core = processor(pair)
    core.add(7, **DEFAULTS | {"n": 2, "stop": ["END"]})
    logprobs = [(1, [(letter[char], -0.5)]) for char in "aENDb"]
    first = Output(7, [letter[char] for char in "aENDb"], index=1, logprobs=logprobs)
    (delta,) = core.process(output_frame([first])).deltas
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.must_abort) == ("a", "stop", "END", True)
    assert delta.token_ids == [letter[char] for char in "aEND"]
    assert delta.logprobs == logprobs[:4]
    later = output_frame([Output(7, [letter["b"]], index=1), Output(7, [letter["b"]], index=0, finish="length")])
    (delta,) = core.process(later).deltas
    assert (delta.index, delta.text, delta.must_abort) == (0, "b", False)
    assert len(core) == 0


def test_held_back_text_is_flushed_at_the_end(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    ids = [pair.ours.token_to_id(char) for char in "abE"]
    core = processor(pair)
    core.add(1, **DEFAULTS | {"stop": ["END"]})
    assert [delta.text for delta in run(core, 1, [[i] for i in ids])] == ["a", "b", "E"]
    core.add(1, **DEFAULTS | {"stop": ["END"]})
    deltas = run(core, 1, [[i] for i in ids], finish=None)
    assert [delta.text for delta in deltas] == ["a", "b", ""]
    (delta,) = core.process(output_frame([Output(1, finish="abort")])).deltas
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("E", [], "abort", None)


def test_a_stop_string_before_min_tokens_does_not_count(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    ids = [pair.ours.token_to_id(char) for char in "abxabxabx"]

    def shown(min_tokens: int, *stops: str, runs: int = 1) -> tuple[str, int, int | str | None]:
        core = processor(pair)
        core.add(1, **DEFAULTS | {"stop": stops, "min_tokens": min_tokens})
        deltas = run(core, 1, [ids[at : at + runs] for at in range(0, 9, runs)])
        text = "".join(delta.text for delta in deltas)
        return text, sum(len(delta.token_ids) for delta in deltas), deltas[-1].stop_reason

    for runs in (1, 2, 9):
        assert shown(0, "ab", runs=runs) == ("", 2, "ab")
        assert shown(2, "ab", runs=runs) == ("", 2, "ab")
        assert shown(3, "ab", runs=runs) == ("abx", 5, "ab")
        assert shown(5, "xab", runs=runs) == ("ab", 5, "xab")
        assert shown(6, "xab", runs=runs) == ("abxab", 8, "xab")
        assert shown(9, "ab", "xab", runs=runs) == ("abxabxabx", 9, None)


def test_a_stop_string_found_at_the_engines_own_end_needs_no_abort(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    core = processor(pair)
    core.add(1, **DEFAULTS | {"stop": ["a"]})
    (delta,) = run(core, 1, [[pair.ours.token_to_id("a") or 0]])
    assert (delta.finish_reason, delta.stop_reason, delta.must_abort) == ("stop", "a", False)


def test_stop_tokens_are_told_from_eos(pairs: dict[str, Pair]) -> None:
    pair = pairs["byte_level"]
    a, b = pair.ours.token_to_id("a") or 0, pair.ours.token_to_id("b") or 0
    end = pair.ours.token_to_id("</s>") or 0

    def last(stop_id: int, **options: Any) -> tuple[str, list[int], str | None, int | str | None]:
        core = processor(pair, [end])
        core.add(1, **DEFAULTS | options)
        frame = output_frame([Output(1, [a, stop_id], finish="stop", stop_token_id=stop_id)])
        (delta,) = core.process(frame).deltas
        return delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason

    assert last(end) == ("a", [a, end], "stop", None)
    assert last(end, skip_special_tokens=False) == ("a", [a, end], "stop", None)
    assert last(b) == ("a", [a, b], "stop", b)
    assert last(b, include_stop_str_in_output=True) == ("ab", [a, b], "stop", b)
    with_end = last(end, include_stop_str_in_output=True, skip_special_tokens=False)
    assert with_end == ("a</s>", [a, end], "stop", None)


@pytest.mark.parametrize(("has_tokenizer", "detokenize"), [(False, True), (True, False)])
def test_without_text_there_are_ids(pairs: dict[str, Pair], has_tokenizer: bool, detokenize: bool) -> None:
    core = processor(pairs["byte_level"] if has_tokenizer else None)
    core.add(1, **DEFAULTS | {"detokenize": detokenize, "stop": ["a"], "prompt_token_ids": [2**32 - 1]})
    deltas = run(core, 1, [[64, 65], [2**32 - 1]])
    assert [(delta.text, delta.token_ids) for delta in deltas] == [("", [64, 65]), ("", [2**32 - 1])]


def test_all_fields_arrive(pairs: dict[str, Pair]) -> None:
    core = processor(pairs["byte_level"])
    core.add(2**63, **DEFAULTS | {"n": 3})
    logprobs = [(3, [(5, -1.5), (6, -0.25)]), (1, [(6, 0.0)])]
    output = Output(2**63, [5, 6], 2, logprobs, num_cached_tokens=32, prompt_logprobs=[(2, [(9, -0.125)])], queue_s=0.5)
    stats = {name: at + (2**40 if code == "Q" else 1) for at, (name, code) in enumerate(STATS.items())}
    frame = core.process(output_frame([output], [(9, "queue_full", "später", 1.5)], stats))
    assert (frame.kind, frame.body, frame.call_id) == ("output", b"", 0)
    (delta,) = frame.deltas
    assert (delta.request_id, delta.index, delta.token_ids) == (2**63, 2, [5, 6])
    assert delta.logprobs == logprobs
    assert delta.prompt_logprobs == [(2, [(9, -0.125)])]
    assert (delta.num_cached_tokens, delta.queue_s) == (32, 0.5)
    assert (delta.finish_reason, delta.stop_reason, delta.must_abort) == (None, None, False)
    (refusal,) = frame.refusals
    assert (refusal.request_id, refusal.kind) == (9, "queue_full")
    assert (refusal.message, refusal.retry_after_s) == ("später", 1.5)
    assert frame.stats is not None
    assert {name: getattr(frame.stats, name) for name in STATS} == stats
    plain = core.process(output_frame([Output(2**63, [5])])).deltas[0]
    assert (plain.logprobs, plain.prompt_logprobs, plain.num_cached_tokens, plain.queue_s) == (None,) * 4


def test_hello_and_replies_pass_through() -> None:
    core = processor(None)
    hello = core.process(hello_frame(b'{"a": 1}'))
    assert (hello.kind, hello.body, hello.stats, hello.deltas, hello.refusals) == ("hello", b'{"a": 1}', None, [], [])
    reply = core.process(reply_frame(2**60, b"{}"))
    assert (reply.kind, reply.call_id, reply.body) == ("reply", 2**60, b"{}")


def test_requests_are_forgotten(pairs: dict[str, Pair]) -> None:
    core = processor(pairs["byte_level"])
    for request_id in range(4):
        core.add(request_id, **DEFAULTS)
    assert len(core) == 4
    core.remove(0)
    core.remove(0)
    frame = core.process(output_frame([Output(0, [65]), Output(1, [65]), Output(77, [65])], [(2, "draining", "", 0.0)]))
    assert [delta.request_id for delta in frame.deltas] == [1]
    assert len(core) == 2
    stray = core.process(output_frame([Output(1, [65], index=5)]))
    assert stray.deltas == []


def test_malformed_frames_are_refused(pairs: dict[str, Pair]) -> None:
    core = processor(pairs["byte_level"])
    core.add(1, **DEFAULTS)
    good = output_frame([Output(1, [65, 66], logprobs=[(1, [(65, -1.0)])])], [(2, "invalid", "no", 0.0)])
    for length in range(len(good)):
        with pytest.raises(ValueError):
            core.process(good[:length])
    with pytest.raises(ValueError, match="1 bytes after its end"):
        core.process(good + b"\0")
    with pytest.raises(ValueError, match="version 9"):
        core.process(b"\x09" + good[1:])
    r = random.Random(7)
    for _ in range(2000):
        damaged = bytearray(good)
        damaged[r.randrange(len(good))] = r.randrange(256)
        # A panic of the decoder is no ValueError.
        with contextlib.suppress(ValueError):
            core.process(bytes(damaged))


def test_client_frames_have_the_documented_layout() -> None:
    add = _core.encode_add(
        request_id=2**50,
        prompt_token_ids=[7, 8, 9],
        n=2,
        max_tokens=16,
        min_tokens=1,
        stop_token_ids=[4],
        priority=-3,
        cache_salt=b"salt",
        deadline_s=1.5,
        logprobs=-1,
        prompt_logprobs=5,
        params=b"{}",
        tenant=2**63,
        weight=1500,
        grammar=b"{}{}",
    )
    want = (
        struct.pack("<BBQ4I", VERSION, 1, 2**50, 3, 7, 8, 9) + struct.pack("<3I", 2, 16, 1) + struct.pack("<II", 1, 4)
    )
    want += (
        struct.pack("<iQII4sd", -3, 2**63, 1500, 4, b"salt", 1.5) + struct.pack("<iiI4sI", -1, 5, 4, b"{}{}", 2) + b"{}"
    )
    want += struct.pack("<II", 0, 0)  # no media, no data of media
    assert add == want
    assert _core.encode_abort(5) == struct.pack("<BBQB", VERSION, 2, 5, 0)
    assert _core.encode_abort(5, 3) == struct.pack("<BBQBI", VERSION, 2, 5, 1, 3)
    assert _core.encode_call(6, b"ping") == struct.pack("<BBQ", VERSION, 3, 6) + b"ping"
    with pytest.raises(OverflowError):
        _core.encode_abort(-1)
