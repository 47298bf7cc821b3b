"""Images in prompts: from what a caller gives to what the worker reads. Not here: the models' encoders (models/)."""
