"""The prefix cache: the KV of past texts, for requests whose prompts begin like them.

A radix tree over token ids, as in SGLang: a node holds some tokens and a copy of their KV, and its children continue
it. Texts that begin alike share the nodes of their beginning. Within a bound of memory; beyond it the ends of the texts
that were not used for the longest time go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence as Seq

from lookfar.core.ids import common_prefix
from lookfar.core.packed_kv import PackedKV

MIN_TOKENS = 16  # a shorter prefix is faster to compute again
Export = Callable[[int, int], PackedKV]  # (start, end) → a copy of the KV of these positions of a text


class _Node:
    """Some tokens behind those of the parent, and their KV."""

    def __init__(self, parent: _Node | None, tokens: Seq[int], kv: PackedKV) -> None:
        self.parent = parent
        self.tokens = list(tokens)
        self.kv = kv
        self.nbytes = kv.nbytes
        self.children: dict[int, _Node] = {}  # by first token

    def path(self) -> Iterator[_Node]:
        """Yield the node and all before it, the root excepted."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The KV of past texts, at most `max_bytes`. Texts of different namespaces do not know of each other."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.evictions = 0  # nodes that were dropped for others
        self._roots: dict[str, _Node] = {}  # by namespace
        # Least recently used first. A path is touched from its end to its beginning, so the first node has no children.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(node.tokens) for node in self._nodes)

    def match(self, namespace: str, tokens: Seq[int]) -> int:
        """Return the length of the longest known beginning of a text."""
        return self._match(namespace, tokens)[1]

    def find(self, namespace: str, tokens: Seq[int]) -> PackedKV | None:
        """Return the KV of the longest known beginning of a text; None if it is too short to matter."""
        last, length, in_last = self._match(namespace, tokens)
        if length < MIN_TOKENS:
            return None
        self._touch(last)
        nodes = list(last.path())[::-1]
        return PackedKV.join([*(node.kv for node in nodes[:-1]), nodes[-1].kv.part(0, in_last)])

    def add(self, namespace: str, tokens: Seq[int], export: Export) -> None:
        """Keep the KV of a text; only what is not known yet is exported."""
        last, length, in_last = self._match(namespace, tokens)
        self._touch(last)
        if len(tokens) - length < 1 or len(tokens) < MIN_TOKENS:
            return
        kv = export(length, len(tokens))
        if kv.nbytes > self.max_bytes:
            return
        if last.parent is not None and in_last < len(last.tokens):
            last = self._split(last, in_last)
        node = _Node(last, tokens[length:], kv)
        last.children[tokens[length]] = node
        self.nbytes += node.nbytes
        self._touch(node)
        self._evict()

    def clear(self) -> None:
        """Forget everything: the weights have changed, for example."""
        self._roots.clear()
        self._nodes.clear()
        self.nbytes = 0

    def _match(self, namespace: str, tokens: Seq[int]) -> tuple[_Node, int, int]:
        """Return the last node of the longest match, the length of the match, and how many tokens of the node match."""
        node = self._roots.setdefault(namespace, _Node(None, (), PackedKV((), 0)))
        length = in_last = 0
        while length < len(tokens) and in_last == len(node.tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            node, in_last = child, common_prefix(child.tokens, tokens[length : length + len(child.tokens)])
            length += in_last
        return node, length, in_last

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the first part. Both get copies, so that each can be dropped alone."""
        assert node.parent is not None
        first = _Node(node.parent, node.tokens[:at], node.kv.part(0, at).copy())
        rest = _Node(first, node.tokens[at:], node.kv.part(at, len(node.tokens)).copy())
        rest.children = node.children
        for child in rest.children.values():
            child.parent = rest
        first.children[rest.tokens[0]] = rest
        node.parent.children[first.tokens[0]] = first
        del self._nodes[node]
        self._nodes[rest] = self._nodes[first] = None
        for old in list(first.path())[1:]:
            self._nodes.move_to_end(old)
        return first

    def _touch(self, node: _Node) -> None:
        for used in node.path():
            self._nodes[used] = None
            self._nodes.move_to_end(used)

    def _evict(self) -> None:
        while self.nbytes > self.max_bytes:
            node, _ = self._nodes.popitem(last=False)
            assert node.parent is not None
            assert not node.children
            del node.parent.children[node.tokens[0]]
            self.nbytes -= node.nbytes
            self.evictions += 1
