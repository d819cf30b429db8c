"""Whom an engine believes: the canonical form of a document, keys, signatures, and how often one may be used.

The package opens no socket and does not ask for the time; only `keyring_file.py` and `shared_files.py` open files, and
only where a command or an application names one.
"""
