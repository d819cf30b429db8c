"""Whom an engine believes: the canonical form of a document, keys, signatures, and how often one may be used.

The one rule: nothing here opens a socket or asks for the time; only `keyring_file.py` and `files.py` open files, and
only where a command or an application names one.
"""
