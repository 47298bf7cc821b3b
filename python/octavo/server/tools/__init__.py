"""How models write calls of tools: one file a format."""
