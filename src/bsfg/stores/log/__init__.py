"""The embedded log: durable buffers in one folder, nothing to install."""
