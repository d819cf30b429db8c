"""Measurements of the project's own parts. Nothing here is shipped with the packages, and no package imports it."""
