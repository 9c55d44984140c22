"""The layout that trains fastest within memory: models as numbers, schedules by formula, the search."""
