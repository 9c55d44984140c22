"""Plans: what a run will take, said before it starts."""
