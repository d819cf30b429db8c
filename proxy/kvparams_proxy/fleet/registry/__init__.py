"""Which engines there are: what operators, files and (later) DNS or Kubernetes say of them, applied to the fleet."""
