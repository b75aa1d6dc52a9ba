"""Which block holds which content: the prefix cache as a tree of hashes. Knows nothing of who holds a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.block_events import BlockEvents, Snapshot


class PrefixIndex:
    """Block <-> content hash, and the parent of each.

    Invariants, checked by `check_integrity`:
      1. `_hash_of` and `_block_of` are inverse.
      2. Prefix-closed: the parent of an entry is an entry. Whoever probes a chain of hashes may search it by halves,
         and a prefix that is found is found whole.
      3. `_children` is the inverse of `_parent`; a block without entries there has no child.

    Every change is told to `events`.
    """

    def __init__(self, events: BlockEvents) -> None:
        self._events = events
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._parent: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}
        self._name_of: dict[int, bytes] = {}
        """Of each entry: what followers know it by."""

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def block_of(self, content_hash: bytes) -> int | None:
        return self._block_of.get(content_hash)

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def parent(self, block: int) -> int | None:
        """The block that holds what precedes; None for the first of a chain, and for a block without a hash."""
        return self._parent.get(block)

    def longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of `hashes` up to the first that is not there."""
        blocks: list[int] = []
        for content_hash in hashes:
            block = self._block_of.get(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def subtree(self, block: int) -> list[int]:
        """An entry and all that continue it, every one behind its parent."""
        subtree = [block]
        for member in subtree:  # grows while it is walked
            subtree += self._children.get(member, ())
        return subtree

    def add(self, block: int, content_hash: bytes, parent: bytes | None, name: bytes = b"") -> bool:
        """Enter a block without a hash under a hash without a block. False, and no entry, if the parent has none.

        `name` is told to followers in place of the hash, unless it is empty.
        """
        parent_name = None
        if parent is not None:
            parent_block = self._block_of.get(parent)
            if parent_block is None:
                return False
            self._parent[block] = parent_block
            self._children.setdefault(parent_block, {})[block] = None
            parent_name = self._name_of[parent_block]
        self._hash_of[block] = content_hash
        self._block_of[content_hash] = block
        self._name_of[block] = name or content_hash
        self._events.stored(self._name_of[block], parent_name)
        return True

    def remove(self, block: int) -> list[int]:
        """Take out an entry and all that continue it. Returns their blocks, every one before its parent."""
        subtree = self.subtree(block)
        for member in subtree:
            self._children.pop(member, None)
        parent = self._parent.get(block)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block]
            if not siblings:
                del self._children[parent]
        subtree.reverse()
        hashes = [self._hash_of.pop(member) for member in subtree]
        for member, content_hash in zip(subtree, hashes, strict=True):
            del self._block_of[content_hash]
            self._parent.pop(member, None)
        self._events.removed([self._name_of.pop(member) for member in subtree])
        return subtree

    def clear(self) -> None:
        for table in (self._hash_of, self._block_of, self._parent, self._children, self._name_of):
            table.clear()
        self._events.cleared()

    def snapshot(self) -> Snapshot:
        return self._events.snapshot(self._name_of[block] for block in self._parents_first())

    def check_integrity(self) -> None:
        assert self._block_of == {content_hash: block for block, content_hash in self._hash_of.items()}
        assert self._parent.keys() <= self._hash_of.keys()
        for block, parent in self._parent.items():
            assert parent in self._hash_of, f"block {block} is found, its parent {parent} is not"
            assert block in self._children[parent]
        assert all(self._children.values()), "an empty set of children"
        assert sum(map(len, self._children.values())) == len(self._parent)
        assert sorted(self._parents_first()) == sorted(self._hash_of)
        assert self._name_of.keys() == self._hash_of.keys()
        self._events.check_integrity(self._name_of.values())

    def _parents_first(self) -> Iterator[int]:
        level = [block for block in self._hash_of if block not in self._parent]
        for block in level:
            yield block
            level += self._children.get(block, ())
