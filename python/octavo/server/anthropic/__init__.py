"""The Messages API in Anthropic's shape: conversations in, messages and stream events out, error bodies."""
