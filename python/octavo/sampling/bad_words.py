"""Bad words: token sequences that are never completed, whether they begin in the prompt or in the output.

A slot's last tokens are kept on the device in a ring (position modulo its length). The words of all slots lie in flat
arrays, rebuilt when rows with words come or go: memory follows the number of tokens in words, not the longest word.

Shape suffixes: s sampled rows, v vocabulary, w words, f first tokens of words (all but the last), r ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.base import MASKED, AdmittedRow, IntArray, SampledRows
from octavo.sampling.tables import upload


class BadWords:
    """See `SamplingParams.bad_words`; the wire parameters carry them as `bad_words_ids`. A tokenizer may know ids that
    the model doesn't: words with such ids can't come up."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._device = device
        self._words: dict[int, Sequence[Sequence[int]]] = {}
        self._staged: list[AdmittedRow] = []
        self._changed = False
        self._ring_sr = torch.full((num_slots + 1, 8), -1, dtype=torch.int64, device=device)
        self._next_s = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """Per slot: the position after the newest token in the ring."""

    def admit(self, row: AdmittedRow) -> bool:
        words = [word for word in row.params.get("bad_words_ids", ()) if word and max(word) < self._vocab_size]
        self._changed |= self._words.pop(row.slot, None) is not None or bool(words)
        if words:
            self._words[row.slot] = words
            self._staged.append(row)
        return bool(words)

    def flush(self) -> None:
        if self._changed and self._words:
            self._upload_words()
        if self._staged:
            longest = max(len(word) for row in self._staged for word in self._words[row.slot])
            self._widen(longest - 1)
            self._upload_tails()
        self._changed = False
        self._staged.clear()

    def _widen(self, need: int) -> None:
        """Make room for `need` tokens a slot, keeping what the rings hold."""
        width = self._ring_sr.shape[1]
        if need <= width:
            return
        wider = 1 << (need - 1).bit_length()
        position_sr = self._next_s.unsqueeze(1) - torch.arange(1, width + 1, device=self._device)
        ring = torch.full((self._num_slots + 1, wider), -1, dtype=torch.int64, device=self._device)
        self._ring_sr = ring.scatter_(1, position_sr % wider, self._ring_sr.gather(1, position_sr % width))

    def _upload_words(self) -> None:
        words = [(slot, word) for slot, slot_words in self._words.items() for word in slot_words]
        lengths = np.array([len(word) - 1 for _, word in words])
        first = [np.asarray(word[:-1], dtype=np.int64) for _, word in words]
        back = [np.arange(length, 0, -1) for length in lengths]
        self._slot_w = upload(np.array([slot for slot, _ in words]), self._device)
        self._last_w = upload(np.array([word[-1] for _, word in words]), self._device)
        self._length_w = upload(lengths, self._device)
        self._token_f = upload(np.concatenate(first), self._device)
        self._back_f = upload(np.concatenate(back), self._device)
        self._word_f = upload(np.repeat(np.arange(len(words)), lengths), self._device)

    def _upload_tails(self) -> None:
        width = self._ring_sr.shape[1]
        ring = np.full((len(self._staged), width), -1, dtype=np.int64)
        for i, row in enumerate(self._staged):
            tail = np.concatenate([row.prompt_ids, row.output_ids])[-width:]
            ring[i, np.arange(row.num_tokens - len(tail), row.num_tokens) % width] = tail
        slots = upload(np.array([row.slot for row in self._staged]), self._device)
        self._ring_sr[slots] = upload(ring, self._device)
        self._next_s[slots] = upload(np.array([row.num_tokens for row in self._staged]), self._device)

    def capture_key(self, host_slots: IntArray) -> Hashable | None:
        return None  # words come and go with their tensors

    def apply(self, logits_sv: Tensor, rows: SampledRows) -> None:
        count = rows.slot_s.shape[0]
        row_of_slot = torch.full((self._num_slots + 1,), -1, dtype=torch.int64, device=self._device)
        row_of_slot[rows.slot_s] = torch.arange(count, device=self._device)
        row_w = row_of_slot[self._slot_w]
        here_w = row_w >= 0
        row_w = row_w.clamp(min=0)
        position_f = rows.position_s[row_w[self._word_f]] - self._back_f
        token_f = self._ring_sr[self._slot_w[self._word_f], position_f % self._ring_sr.shape[1]]
        equal_f = ((token_f == self._token_f) & (position_f >= 0)).long()
        equal_w = torch.zeros_like(self._length_w).index_add_(0, self._word_f, equal_f)
        mask_w = ((equal_w == self._length_w) & here_w).float().mul_(MASKED)
        logits_sv.index_put_((row_w, self._last_w), mask_w, accumulate=True)

    def observe(self, rows: SampledRows, token_s: Tensor) -> None:
        self._ring_sr[rows.slot_s, rows.position_s % self._ring_sr.shape[1]] = token_s
        self._next_s[rows.slot_s] = rows.position_s + 1
