"""Peak memory of training steps, by the compilers of accelerators."""
