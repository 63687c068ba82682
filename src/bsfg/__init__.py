"""Bidirectional Store-and-Forward Gateway."""

__version__ = "0.1.0"
