"""Other ways to spend fewer bytes on an optimizer, and exchanges of optimizers."""
