"""Storages that implement the ports; they know the ports and the values, never each other."""
