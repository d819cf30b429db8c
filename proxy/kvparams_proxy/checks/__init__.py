"""Checks of engines against their declarations: on request (`--check`), and in the background after the start."""
