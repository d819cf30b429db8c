"""The conformance kit: it holds proxies, engines and stores to the specification, from outside.

    kvparams conformance proxy --start COMMAND
    kvparams conformance engine URL
    kvparams conformance store URL

A check is a small function that is registered with its requirement. It sends something, and judges only what crossed
the wire. The package imports `kvparams` alone.
"""
