"""What a pool remembers of prompts: which page holds which tokens, after which others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvplug.stores.arena import Arena, Holder
from kvplug.stores.contiguous import ordinary_tensors


@dataclass
class Node:
    """A page of a known prompt; `key` is what it is found by, and `used` when that was last."""

    page: int
    number: int
    key: tuple
    parent: Node | None
    used: int


class Prefixes(Holder):
    """A tree of pages. A page is found by its own tokens and by the page before it, and the first one by the number of
    padding tokens: keys are compared as they are, not by a hash alone, so that no other page can be taken for it.

    Args:
        arena: where the pages are.
        page_size: tokens of a page.
    """

    def __init__(self, arena: Arena, page_size: int):
        self.arena, self.page_size = arena, page_size
        self.nodes: dict[tuple, Node] = {}
        self.time = self.numbers = 0
        arena.holders.add(self)

    @ordinary_tensors
    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.arena.holders.add(self)
        self.arena.hold(torch.tensor(self.held_pages(), dtype=torch.int64))

    def __repr__(self) -> str:
        return f"Prefixes({len(self.nodes)} pages)"

    @property
    def holds(self) -> bool:
        return bool(self.nodes)

    def held_pages(self) -> Iterable[int]:
        return [node.page for node in self.nodes.values()]

    def rename(self, names: torch.Tensor) -> None:
        for node in self.nodes.values():
            node.page = int(names[node.page])

    def _keys(self, ids: Sequence[int], padding: int, pages: int) -> Iterable[tuple]:
        for start in range(0, pages * self.page_size, self.page_size):
            yield padding, tuple(ids[start : start + self.page_size])

    def _key(self, parent: Node | None, own: tuple) -> tuple:
        padding, ids = own
        return (-1 - padding if parent is None else parent.number), ids

    def find(self, ids: Sequence[int], padding: int, pages: int) -> list[int]:
        """The known pages that a row begins with, at most `pages`.

        Args:
            ids: the row's tokens, of which the first `padding` are padding.
        """
        self.time += 1
        found: list[int] = []
        parent = None
        for own in self._keys(ids, padding, pages):
            parent = self.nodes.get(self._key(parent, own))
            if parent is None:
                break
            parent.used = self.time
            found.append(parent.page)
        return found

    def add(self, ids: Sequence[int], padding: int, pages: Sequence[int]) -> None:
        """Remembers the pages of a row; of those that are known already the known one stays."""
        self.time += 1
        parent, new = None, []
        for own, page in zip(self._keys(ids, padding, len(pages)), pages, strict=True):
            key = self._key(parent, own)
            node = self.nodes.get(key)
            if node is None:
                self.numbers += 1
                node = self.nodes[key] = Node(page, self.numbers, key, parent, self.time)
                new.append(page)
            node.used = self.time
            parent = node
        self.arena.hold(torch.tensor(new, dtype=torch.int64))

    @property
    def forgettable(self) -> list[Node]:
        """Pages that nobody else holds, nor any that goes on from them; those to leave first come first: the least
        recently used, of one prompt the last."""
        refs, needed = self.arena.refs.tolist(), set()
        free = []
        # Whatever goes on from a page was remembered after it.
        for node in reversed(self.nodes.values()):
            if refs[node.page] == 1 and node.number not in needed:
                free.append(node)
            elif node.parent is not None:
                needed.add(node.parent.number)
        # A page was used whenever one that goes on from it was, so none leaves before those.
        return sorted(free, key=lambda node: (node.used, -node.number))

    def forget(self, pages: int) -> None:
        """Gives up so many of the forgettable pages."""
        gone = self.forgettable[:pages]
        for node in gone:
            del self.nodes[node.key]
        self.arena.release(torch.tensor([node.page for node in gone], dtype=torch.int64))

    def clear(self) -> None:
        """Gives up all."""
        pages = torch.tensor(self.held_pages(), dtype=torch.int64)
        self.nodes = {}
        self.arena.release(pages)
