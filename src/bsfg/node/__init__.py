"""One zone's node: its configuration, who may do what, and the service itself."""
