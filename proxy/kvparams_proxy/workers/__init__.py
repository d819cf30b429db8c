"""Several worker processes on one port, and the supervisor that starts, watches and replaces them."""
