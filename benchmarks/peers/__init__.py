"""Measures the proxy beside other routers, with the same stub engines, requests and rounds."""
