"""Components of a directed graph, without recursion: jobs have tens of thousands of ranks."""

from collections.abc import Collection, Hashable, Mapping
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)


def closing_components(edges: Mapping[N, Collection[N]]) -> list[list[N]]:
    """The strongly connected components that no arrow leaves, by Tarjan's algorithm."""
    strong = components(edges)
    home = {node: number for number, members in enumerate(strong) for node in members}
    left = {home[a] for a, targets in edges.items() for b in targets if home[a] != home[b]}
    return [members for number, members in enumerate(strong) if number not in left]


def components(edges: Mapping[N, Collection[N]]) -> list[list[N]]:
    """The strongly connected components."""
    search = _Search(edges)
    for node in edges:
        if node not in search.order:
            search.walk(node)
    return search.components


class _Search(Generic[N]):
    def __init__(self, edges: Mapping[N, Collection[N]]) -> None:
        self.components: list[list[N]] = []
        self.order: dict[N, int] = {}
        self._edges = edges
        self._low: dict[N, int] = {}
        self._stack: list[N] = []
        self._open: set[N] = set()

    def walk(self, root: N) -> None:
        path = [(root, iter(self._enter(root)))]
        while path:
            node, targets = path[-1]
            step = next(targets, None)
            if step is None:
                path.pop()
                self._leave(node, path[-1][0] if path else None)
            elif step not in self.order:
                path.append((step, iter(self._enter(step))))
            elif step in self._open:
                self._low[node] = min(self._low[node], self.order[step])

    def _enter(self, node: N) -> Collection[N]:
        self.order[node] = self._low[node] = len(self.order)
        self._stack.append(node)
        self._open.add(node)
        return self._edges.get(node, ())

    def _leave(self, node: N, above: N | None) -> None:
        if above is not None:
            self._low[above] = min(self._low[above], self._low[node])
        if self._low[node] != self.order[node]:
            return
        members: list[N] = []
        while not members or members[-1] != node:
            members.append(self._stack.pop())
            self._open.discard(members[-1])
        self.components.append(members)
