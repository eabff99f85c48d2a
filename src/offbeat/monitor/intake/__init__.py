"""How a monitor takes events in: where they come from, what caused what, and the order in which they are judged."""
