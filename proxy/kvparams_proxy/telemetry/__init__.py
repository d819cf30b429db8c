"""What is told of requests: metrics, request log, traces."""
