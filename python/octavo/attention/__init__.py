"""Attention backends: one file each, chosen by name (base.BACKENDS)."""
