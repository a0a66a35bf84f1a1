"""Which rank has which experts of a mixture, and copies of some: at first by a rule, later by how busy they are.

A placement is, for each rank, the expert in each of its places; a rank has an expert once at most, and how many places
it has does not change. In: counts and loads. Out: placements. Deterministic, so that ranks that know the same loads
come to the same placement by themselves. Must not know: tensors, layers, how ranks talk.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.schema.errors import ConfigError

Placement = tuple[tuple[int, ...], ...]


def first_placement(count: int, ranks: int, strategy: str, redundant: int = 0) -> Placement:
    """`strategy`: linear (neighbours) or round_robin (each in turn); copies are those of the first experts.
    ConfigError: there are more ranks than experts, or more copies than ranks can have."""
    if count < ranks:
        raise ConfigError(f"{count} experts cannot be shared out among {ranks} ranks", value=count)
    if redundant > count * (ranks - 1):
        raise ConfigError(
            f"num_redundant_experts is {redundant}: each of {count} experts can have {ranks - 1} copies on {ranks} "
            "ranks",
            param="num_redundant_experts",
            value=redundant,
        )
    if strategy == "round_robin":
        own = [list(range(rank, count, ranks)) for rank in range(ranks)]
    else:
        own = [list(range(count * rank // ranks, count * (rank + 1) // ranks)) for rank in range(ranks)]
    if not redundant:
        return tuple(map(tuple, own))
    total = count + redundant
    places = [total * (rank + 1) // ranks - total * rank // ranks for rank in range(ranks)]
    return tuple(tuple(sorted(chosen)) for chosen in _choose([1.0] * count, own, places))


def balanced(loads: Sequence[float], now: Placement) -> Placement:
    """Busy experts get the copies, and every rank about the same load. Experts that stay keep their places."""
    chosen = _choose(loads, now, [len(own) for own in now])
    return tuple(_in_place(was, new) for was, new in zip(now, chosen, strict=True))


def _choose(loads: Sequence[float], now: Sequence[Sequence[int]], places: Sequence[int]) -> list[list[int]]:
    """The experts of each rank, which has so many places."""
    copies = _copies(loads, sum(places) - len(loads), len(places))
    share = [load / number for load, number in zip(loads, copies, strict=True)]
    chosen: list[list[int]] = [[] for _ in places]
    total = [0.0] * len(places)
    for expert in sorted(range(len(loads)), key=lambda one: (-copies[one], -share[one], one)):
        room = [rank for rank in range(len(places)) if len(chosen[rank]) < places[rank]]
        if copies[expert] > 1:  # the ranks with the most room, or none is left for those that follow
            room.sort(key=lambda rank: (len(chosen[rank]) - places[rank], total[rank], rank))
        else:
            room.sort(key=lambda rank: (total[rank], expert not in now[rank], rank))
        for rank in room[: copies[expert]]:
            chosen[rank].append(expert)
            total[rank] += share[expert]
    return chosen


def balancedness(loads: Sequence[float], placement: Placement) -> float:
    """The mean load of a rank, divided by the largest: 1 is even."""
    copies = [sum(expert in own for own in placement) for expert in range(len(loads))]
    of_rank = [sum(loads[expert] / copies[expert] for expert in own) for own in placement]
    return sum(of_rank) / len(of_rank) / max(of_rank) if max(of_rank) > 0 else 1.0


def _copies(loads: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """Of each expert: one more for that with the largest share, again and again."""
    copies = [1] * len(loads)
    for _ in range(redundant):
        least = [expert for expert in range(len(loads)) if copies[expert] < ranks]
        copies[max(least, key=lambda expert: (loads[expert] / copies[expert], -copies[expert], -expert))] += 1
    return copies


def _in_place(was: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    come = [expert for expert in new if expert not in was]
    return tuple(expert if expert in new else come.pop(0) for expert in was)
