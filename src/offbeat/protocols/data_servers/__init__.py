"""Data servers: processes that prepare batches ahead of need and hand them out by number."""
