"""Sources of engines outside of files: Kubernetes and DNS. Each is an `InstanceProvider`, in one file."""
