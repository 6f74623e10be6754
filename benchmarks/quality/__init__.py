"""Validation loss of many optimizers, each at its best learning rate."""
