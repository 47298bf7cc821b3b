"""The block cache in plain Python: a list of free blocks, and cached content named by the whole token prefix.

The second opinion on rust/core/src/{block_pool,prefix,cache}.rs. No hashes, no linked lists: slow and easy to believe.
"""

from __future__ import annotations

from collections.abc import Hashable

Content = tuple[Hashable, tuple[int, ...]]
"""Salt and all tokens from the start of the sequence to the end of a block."""


class PlainBlocks:
    """Free blocks are taken from the front; those that cache something go to the back."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching
        self.free = list(range(1, num_blocks))
        self.uses = [0] * num_blocks
        self.block_of: dict[Content, int] = {}

    def _content(self, salt: Hashable, tokens: list[int], index: int) -> Content:
        return salt, tuple(tokens[: (index + 1) * self.block_size])

    def find(self, salt: Hashable, tokens: list[int]) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to run."""
        found: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size if self.caching else 0):
            block = self.block_of.get(self._content(salt, tokens, index))
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.uses[block] == 0:
                self.free.remove(block)
            self.uses[block] += 1

    def take(self) -> int:
        block = self.free.pop(0)
        self.block_of = {content: other for content, other in self.block_of.items() if other != block}
        self.uses[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.uses[block] -= 1
            assert self.uses[block] >= 0
            if self.uses[block] == 0:
                self.free.insert(len(self.free) if block in self.block_of.values() else 0, block)

    def publish(self, salt: Hashable, tokens: list[int], index: int, block: int) -> None:
        if self.caching:
            self.block_of.setdefault(self._content(salt, tokens, index), block)
