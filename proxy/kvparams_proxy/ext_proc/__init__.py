"""Envoy's ext_proc protocol, as endpoint pickers speak it: the messages, and a client. Needs the extra `picker`."""
