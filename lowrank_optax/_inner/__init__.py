"""The inner optimizer, seen from outside: what it remembers, forgets and answers.

Level 4: stands on `_plan`.
"""
