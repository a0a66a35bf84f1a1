"""A small retrieval task in the form of MTEB's: documents, queries, and which documents answer a query (2: it does, 1:
it has to do with it), with nDCG over the ten best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

DOCUMENTS = (
    "A kitten is resting on a rug near the stove.",
    "Cats sleep between twelve and sixteen hours a day, mostly in warm places.",
    "Dogs were domesticated earlier than any other animal.",
    "The veterinarian vaccinated the puppy against rabies.",
    "Trains to the coast leave every hour from platform four.",
    "The night bus runs until two in the morning and costs as much as the day bus.",
    "A cyclist needs a lamp, a bell and two brakes that work.",
    "Interest rates were raised by a quarter of a percent.",
    "The central bank expects inflation to fall below three percent next year.",
    "Shares of the steel maker lost a tenth of their value after the report.",
    "A mortgage with a fixed rate protects the borrower from rising rates.",
    "The bridge was built of stone two hundred years ago.",
    "Concrete gains most of its strength in the first four weeks.",
    "An arch carries its load by compression alone.",
    "Flour, water, salt and yeast are kneaded, left to rise and baked.",
    "Sourdough is raised by wild yeast and bacteria instead of baker's yeast.",
    "Slice the onions thinly and fry them in butter until they are brown.",
    "A soup of lentils needs half an hour on a low flame.",
    "The team lost its last match by one goal.",
    "She won the marathon in two hours and twenty minutes.",
    "In chess, a player who cannot move and is not in check has drawn the game.",
    "Photosynthesis turns carbon dioxide and water into sugar, with light as the source of energy.",
    "The leaves of maples turn red in autumn when their chlorophyll decays.",
    "Bees tell each other where flowers are by dancing.",
    "Whales are mammals: they breathe air and nurse their young.",
    "The moon causes the tides, and the sun makes them stronger or weaker.",
    "A solar eclipse happens when the moon stands between the sun and the earth.",
    "Jupiter is heavier than all other planets together.",
    "The telescope found water vapour in the air of a distant planet.",
    "Vitamin C is destroyed by long cooking.",
    "Antibiotics have no effect on viruses.",
    "The vaccine teaches the immune system what the virus looks like.",
    "Washing hands with soap for twenty seconds removes most germs.",
    "A list in Python can hold objects of different types.",
    "The compiler reports an error when a variable is used before it is declared.",
    "An index makes a query of a database faster and an insertion slower.",
    "Passwords should be stored as salted hashes and never as plain text.",
    "The painter mixed ultramarine with white to paint the sky.",
    "The string quartet played two pieces by Haydn.",
    "The novel tells of three sisters who inherit a lighthouse.",
    "Rain is expected in the north, with strong winds along the coast.",
    "The drought has lowered the level of the reservoir by nine metres.",
)
RELEVANT: dict[str, Mapping[int, int]] = {
    "Where do cats sleep?": {0: 2, 1: 2},
    "What did the central bank decide?": {7: 2, 8: 1},
    "How is bread made?": {14: 2, 15: 2},
    "public transport at night": {5: 2, 4: 1},
    "Why do leaves change colour?": {22: 2, 21: 1},
    "What makes the sea rise and fall?": {25: 2},
    "largest planet of the solar system": {27: 2},
    "Can I take antibiotics against a cold?": {30: 2},
    "How do vaccines work?": {31: 2, 3: 1},
    "protecting user credentials in a web application": {36: 2},
    "Why is my SQL query slow?": {35: 2},
    "stock market losses": {9: 2},
    "How do insects communicate?": {23: 2},
    "classical music concert": {38: 2},
    "weather forecast": {40: 2, 41: 1},
    "old constructions made of rock": {11: 2, 13: 1},
    "stalemate rule": {20: 2},
    "home loan with constant interest": {10: 2, 7: 1},
}


def ranking(scores: Sequence[float]) -> list[int]:
    """Documents, the best first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def ndcg(order: Sequence[int], relevant: Mapping[int, int], at: int = 10) -> float:
    """The gain of the first `at` documents over the largest that is possible."""

    def gain(grades: Sequence[int]) -> float:
        return sum((2**grade - 1) / math.log2(place + 2) for place, grade in enumerate(grades[:at]))

    return gain([relevant.get(index, 0) for index in order]) / gain(sorted(relevant.values(), reverse=True))
