"""Fine-tuning Hugging Face models: checkpoints in and out, chat data, and the command line."""
