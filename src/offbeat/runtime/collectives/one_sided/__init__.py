"""Memory that the processes of one host share: segments, signals between them, and collectives executed there."""
