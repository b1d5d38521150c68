"""Programs that make the data files of this repository, or check it where its tests do not reach."""
