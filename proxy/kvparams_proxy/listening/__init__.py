"""Listening sockets that this process has not opened itself: those of systemd, and those of its predecessor."""
