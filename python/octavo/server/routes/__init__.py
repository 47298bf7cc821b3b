"""Endpoints, one file a family; each file has a `ROUTES` list and app.py joins them."""
