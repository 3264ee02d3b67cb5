"""The KV pool in blocks.

Block 0 is the null block: an engine sets it aside at start, so a pool of N blocks has N-1 to give. Every
block is either free or owned by exactly one sequence; a block freed twice raises.
"""

NULL_BLOCK = 0


class PoolError(RuntimeError):
    """A block was freed that nobody held: a defect of the scheduler."""


class BlockPool:
    """Hands out blocks by number, last freed first."""

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 2 or block_size < 1:
            raise ValueError(f"no pool: {blocks} blocks of {block_size} tokens")
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, NULL_BLOCK, -1))
        self._held = bytearray(blocks)

    @property
    def usable(self) -> int:
        """Blocks that sequences can hold altogether."""
        return self.blocks - 1

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def usage_ratio(self) -> float:
        """Share of the usable blocks that is held, 0..1."""
        return 1.0 - self.free / self.usable

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` KV tokens of one sequence take."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """``count`` free blocks, or None (and nothing taken) if there are not as many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._held[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free the blocks of a sequence and empty its list."""
        while blocks:
            block = blocks.pop()
            if not self._held[block]:
                raise PoolError(f"block {block} is free already")
            self._held[block] = 0
            self._free.append(block)
