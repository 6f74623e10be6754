"""Whole training runs of the examples: a real checkpoint, and seeds of reinforcement learning."""
