"""The search for the layout that trains fastest within memory, with profiles of models and schedules by formula."""
