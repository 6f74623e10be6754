"""What every run needs: command line, data, optimizers, training loop, checkpoints and output."""
