"""Steps with closures that are computed portion by portion, under `sandblaster`."""
