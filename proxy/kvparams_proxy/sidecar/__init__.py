"""The proxy beside one engine: in front of it as a process of its own, or inside its server."""
