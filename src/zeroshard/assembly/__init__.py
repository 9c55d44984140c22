"""Assembly: what puts rings and satellites together beside api.py: the user's optimizer, stage="auto", names that a program gives."""
