"""What is on disk: readers of checkpoint formats, each giving tensors and their place in a file."""
