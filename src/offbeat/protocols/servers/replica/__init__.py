"""One replica of one shard: its log, its rules, and who may serve."""
