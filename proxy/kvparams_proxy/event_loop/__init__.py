"""Helpers of the event loop: its clock, deadlines, and long work in steps."""
