"""The decoder that the scripts train: its layers and shapes, LoRA adapters and bfloat16 weights."""
