"""Provides the fixtures of the tests of stores and connectors."""

from tests.support.connectors.fixtures import opened

__all__ = ["opened"]
