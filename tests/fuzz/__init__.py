"""What clients and engines may send, made up at random for as long as one likes: `python -m tests.fuzz`."""
