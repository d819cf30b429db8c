"""The index tells which workers hold how much of a prompt's prefix, by token ids. It needs the extra `index`."""
