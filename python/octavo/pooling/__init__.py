"""Models that make vectors and scores of texts instead of text: no scheduler, no KV cache."""
