"""One run as the process that launches it sees it."""
