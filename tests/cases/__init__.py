"""Faults that users of other servers met, tried against a real server."""
