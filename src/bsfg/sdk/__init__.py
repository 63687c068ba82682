"""What applications import: producers, consumers, and local reads that need no node.

Everything here is also found as ``from bsfg import Producer, Consumer, LocalReader``.
"""
