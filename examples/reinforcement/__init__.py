"""Reinforcement learning with rewards that a program computes: tasks, losses and the loop."""
