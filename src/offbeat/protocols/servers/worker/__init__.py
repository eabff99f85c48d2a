"""The worker's half: what it asks of servers, when, and until it is answered."""
