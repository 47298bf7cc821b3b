"""How models write their reasoning: one file a format."""
