"""Parameter servers as processes: the machines of `protocols.servers` on real sockets, clocks and memory."""
