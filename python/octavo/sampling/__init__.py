"""From logits to token ids: one file a feature, state per slot on the device."""
