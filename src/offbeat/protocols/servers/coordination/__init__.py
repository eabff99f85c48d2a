"""Who takes part: signs of life, meetings, and who takes over."""
