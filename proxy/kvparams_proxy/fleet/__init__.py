"""The engines: who is ready, how much runs on each, who runs the next leg."""
