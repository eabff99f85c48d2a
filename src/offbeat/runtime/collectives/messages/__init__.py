"""Point-to-point messages between processes of one host."""
