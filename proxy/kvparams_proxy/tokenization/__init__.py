"""Token ids of a prompt that came as text, so that routing can ask who holds its prefix."""
