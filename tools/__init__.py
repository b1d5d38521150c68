"""Programs that make the data files of this repository."""
