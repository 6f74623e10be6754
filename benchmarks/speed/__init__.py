"""Time of steps, updates, refreshes and tracing."""
