"""The KV pool with automatic prefix caching, as vLLM's V1 does it.

A full block of a prompt is known by a hash of all tokens up to its end. Blocks that nobody reads any more
stay as they are and go to the end of the free list, the last of a sequence first; whoever needs blocks takes
them from the front, and what they held is then forgotten (least recently used). A sequence that begins like
one before takes over the blocks that are still there; a block is free once nobody reads it.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvctl.sim.blocks import NULL_BLOCK, BlockPool, PoolError


class CachingPool(BlockPool):
    """A pool whose blocks may have several readers."""

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self._idle = OrderedDict.fromkeys(range(NULL_BLOCK + 1, blocks))  # the next to be taken first
        self._readers = [0] * blocks
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Blocks nobody reads, with or without contents."""
        return len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks to write, or None (and nothing taken) if there are not as many."""
        idle = self._idle
        if count > len(idle):
            return None
        taken = [idle.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._readers[block] = 1
            known = self._hash_of.pop(block, None)
            if known is not None:
                del self._block_of[known]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """A sequence reads its blocks no more; its list is emptied."""
        while blocks:
            block = blocks.pop()
            if not self._readers[block]:
                raise PoolError(f"block {block} is free already")
            self._readers[block] -= 1
            if not self._readers[block]:
                self._idle[block] = None

    def find(self, hashes: Sequence[int], most: int) -> list[int]:
        """The blocks that hold the beginning of a prompt, at most so many."""
        found = []
        for known in hashes[:most]:
            block = self._block_of.get(known)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of ``blocks`` nobody reads: reading them takes them off the free list."""
        return sum(not self._readers[block] for block in blocks)

    def read(self, blocks: Sequence[int]) -> None:
        """One more sequence reads these blocks."""
        for block in blocks:
            if not self._readers[block]:
                del self._idle[block]
            self._readers[block] += 1

    def keep(self, block: int, known: int) -> None:
        """A block holds the prompt that ends with ``known``, unless another does already."""
        if known not in self._block_of:
            self._block_of[known] = block
            self._hash_of[block] = known
