"""The Responses API: conversations of items in, output items and their stream events out, and what is kept of them."""
