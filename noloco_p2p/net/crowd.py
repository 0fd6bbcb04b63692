"""Who has to go when too many have come: of those that take the most places together, the one that came first. Pure."""

from __future__ import annotations

from collections import OrderedDict


class Crowd:
    """Members by number, each of a group; at most `of_one` of a group and `in_all` altogether."""

    def __init__(self, *, of_one: int, in_all: int) -> None:
        self._of_one = of_one
        self._in_all = in_all
        self._group_of: OrderedDict[int, str] = OrderedDict()  # in the order in which they came
        self._groups: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, member: int) -> bool:
        return member in self._group_of

    def enter(self, member: int, group: str) -> list[int]:
        """Those that have to go for it, which are no members any more."""
        self._group_of[member] = group
        self._groups.setdefault(group, OrderedDict())[member] = None
        gone = [next(iter(self._groups[group]))] if len(self._groups[group]) > self._of_one else []
        if not gone and len(self) > self._in_all:
            gone = [self._first_of_the_largest()]
        for each in gone:
            self.leave(each)
        return gone

    def leave(self, member: int) -> None:
        """Nothing happens when it is no member."""
        group = self._group_of.pop(member, None)
        if group is not None:
            del self._groups[group][member]
            if not self._groups[group]:
                del self._groups[group]

    def _first_of_the_largest(self) -> int:
        largest = max(map(len, self._groups.values()))
        return next(member for member, group in self._group_of.items() if len(self._groups[group]) == largest)
