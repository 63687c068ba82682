"""Tools for people who write storages: the conformance kit, faults and simulated power loss."""
