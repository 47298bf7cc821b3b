"""Where a step's rows have the states of recurrent layers, for the kernels of those layers and their references.

A block of the cache holds one state: that after the last position of the block which has been computed. A row reads
the state before its first token, in the block of the position before, and leaves states where its tokens leave a block
and where they end. What a state is of, its layer says; its numbers are fp32.

Shape suffixes: s slots, b blocks, r rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of any number of tokens, [start, end) of the step; as the host knows it."""

    start: int
    end: int
    read: int | None
    """Block of the state before it; None: it begins a sequence."""
    pieces: list[tuple[int, int, int]]
    """(first token, last + 1, block that gets the state after them): cut where blocks end."""


@dataclass(slots=True)
class StateRows:
    """Rows of a step, the same for all layers of a cache group. Arrays are int32, on the device."""

    block_table_sb: Tensor
    row_slot_r: Tensor
    query_start_r: Tensor
    """[num_rows + 1]: row r owns the tokens [query_start_r[r], query_start_r[r + 1])."""
    kv_len_r: Tensor
    """Positions of a row's sequence, with its tokens of this step."""
    block_size: int
    num_rows: int
    num_decode_rows: int
    """The first rows, of one token each."""
    max_query_len: int
    num_decode_rows_1: Tensor | None = None
    """[1], if only the device knows how many rows decode; `num_decode_rows` is then the most there can be, and at most
    `num_rows - num_decode_rows` rows have more than one token."""
    _prompts: list[PromptRow] | None = field(default=None, init=False)

    @property
    def num_prompt_rows(self) -> int:
        """Rows of more than one token, at most."""
        return self.num_rows - self.num_decode_rows

    def count_decodes(self) -> int:
        """How many rows decode. Asks the device, if only that knows."""
        return self.num_decode_rows if self.num_decode_rows_1 is None else int(self.num_decode_rows_1)

    def decodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows that decode, int64: the block of the state before, of the state after, and (bool) which have none
        before."""
        count = self.count_decodes()
        slot_r, position_r = self.row_slot_r[:count].long(), self.kv_len_r[:count].long() - 1
        read_r = self.block_table_sb[slot_r, (position_r - 1).clamp(min=0) // self.block_size]
        write_r = self.block_table_sb[slot_r, position_r // self.block_size]
        return read_r.long(), write_r.long(), position_r == 0

    def prompts(self) -> list[PromptRow]:
        """The other rows that have tokens. Asks the device, once a step."""
        if self._prompts is None:
            self._prompts = self._find_prompts()
        return self._prompts

    def _find_prompts(self) -> list[PromptRow]:
        first, size = self.count_decodes(), self.block_size
        if first == self.num_rows:
            return []
        slots, lengths = self.row_slot_r[first : self.num_rows].tolist(), self.kv_len_r[first : self.num_rows].tolist()
        starts = self.query_start_r[first : self.num_rows + 1].tolist()
        found = []
        for slot, length, start, end in zip(slots, lengths, starts, starts[1:], strict=False):
            if start == end:
                continue
            blocks, begin = self.block_table_sb[slot].tolist(), length - (end - start)
            borders = [*range((begin // size + 1) * size, length, size), length]
            pieces, token = [], start
            for border in borders:
                stop = end - (length - border)
                pieces.append((token, stop, blocks[(border - 1) // size]))
                token = stop
            found.append(PromptRow(start, end, blocks[(begin - 1) // size] if begin else None, pieces))
        return found
