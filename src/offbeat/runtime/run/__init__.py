"""What a run is asked to do, what it leaves on disk, and its result."""
