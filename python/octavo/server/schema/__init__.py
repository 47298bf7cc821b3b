"""Request bodies of the HTTP API, one file an endpoint family; `parse.py` is the engine under them."""
