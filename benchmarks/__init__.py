"""What this library costs and what it brings, measured; ``RESULTS.md`` says how to run it."""
