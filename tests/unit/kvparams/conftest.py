"""Provides the fixtures of the tests of the protocol."""

from tests.support.kvparams.fixtures import schema, schema_accepts

__all__ = ["schema", "schema_accepts"]
