"""The examples that the real checkpoint learns."""

from benchmarks.checkpoints import smollm2

DICTIONARY = """00-database-short
     A dictionary
cup
    n 1: a small open
         container; "a cup of tea" [syn: {mug}]
    2: a prize
    v 1: form into a cup
mug
    n 1: a small open
         container; "a mug of tea" [syn: {cup}]
run
    v 1: move fast [ant: {walk}]
soon
    adv 1: in a short
           time
"""


def test_first_meanings_by_word_and_kind():
    assert smollm2.definitions(DICTIONARY) == {
        # A synonym has the same meaning, and is no second example.
        "a small open container": "cup (noun):",
        "move fast": "run (verb):",
        "in a short time": "soon (adverb):",
    }
