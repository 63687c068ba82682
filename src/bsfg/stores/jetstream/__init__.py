"""A zone's facts, cursors, state and artifacts in NATS JetStream."""
