"""Files of requests and the batches that run them: one SQLite file, a low-priority runner, output and error files."""
