"""Executes plans on a device: runners, arenas, slots, graphs, memory. No policy."""
