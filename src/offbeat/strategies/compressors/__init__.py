"""Compressors, one file each: less is sent."""
