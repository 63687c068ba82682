"""Sinks: what gives the facts of a durable consumer to something else, in order, and confirms what that has."""
