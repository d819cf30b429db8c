"""The proxy's settings: options, fleet files, and how they are parsed."""
