"""The workers of a run as a group, connected directly or through a coordinator."""
