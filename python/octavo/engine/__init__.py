"""The engine loop, its process, and the client that talks to it."""
