"""Where other libraries meet this one: each folder is for one of them, and imports it."""
