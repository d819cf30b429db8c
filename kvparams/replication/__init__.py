"""Messages by which the proxies of one site tell each other what they know of its engines."""
