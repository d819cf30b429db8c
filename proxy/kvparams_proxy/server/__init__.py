"""The HTTP edge of the proxy, and the lifetime of its app."""
