"""The HTTP server. Imports neither torch nor the worker."""
