"""Models: where they come from, their configs, their weights, their forward passes."""
