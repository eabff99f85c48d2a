"""Parameter servers as machines: what they do with a push and a pull, who waits for whom, and who takes over."""
