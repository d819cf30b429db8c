"""Subscribes to engines' KV events over ZMQ and enters them into the prefix index. Needs the extra `events`."""
