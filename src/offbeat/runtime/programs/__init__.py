"""Programs for servers, compiled: their plans run by torch, in place and chunk by chunk."""
