"""Discovery of engines: entries from operators, files and (later) DNS or Kubernetes, applied to the fleet."""
