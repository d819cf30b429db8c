"""What engines say of their caches over ZMQ, heard and entered into the books. Needs the extra `events`."""
