"""Lines of verse for the sonnet dataset, put together from word lists written for Quire.

Benchmarks want prose-like text whose lines differ in length and share words. In: how many lines, a seed. Out: lines of
eight to twelve syllables, no two alike.
"""

from __future__ import annotations

from random import Random

_OPENINGS = (
    "When morning", "If evening", "Though winter", "Before the harvest", "Beneath the rafters", "Whenever thunder",
    "Because the river", "Until the lantern", "While every orchard", "Since neither mountain", "As though the harbour",
    "Where once the garden",
)  # fmt: skip
_VERBS = (
    "carries", "remembers", "gathers", "forgives", "measures", "awakens", "answers", "covers", "surrenders", "follows",
    "borrows", "repairs",
)  # fmt: skip
_OBJECTS = (
    "the silver road", "a broken bell", "the patient sea", "my father's coat", "an open door", "the falling snow",
    "her quiet hands", "a hundred names", "the copper moon", "our narrow boat", "the weathered stone",
    "a field of rye", "the ash and ember", "that stubborn clock",
)  # fmt: skip
_CLOSINGS = (
    "and asks for nothing more", "with all it ever knew", "before the day is done", "and will not turn again",
    "as softly as it came", "for those who never sleep", "until the candle fails", "and leaves the window wide",
    "while I am far away", "in letters no one reads", "and so the story ends", "without a word of blame",
)  # fmt: skip


def write_lines(count: int, *, seed: int) -> list[str]:
    random = Random(seed)
    lines: dict[str, None] = {}
    while len(lines) < count:
        parts = [random.choice(_OPENINGS), random.choice(_VERBS), random.choice(_OBJECTS)]
        if random.random() < 0.6:
            parts[-1] += ","
            parts.append(random.choice(_CLOSINGS))
        lines[" ".join(parts) + random.choice((",", ";", ".", " –"))] = None
    return list(lines)
