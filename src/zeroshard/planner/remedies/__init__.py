"""What would make a plan fit: changes of the run, ranked by formula, tried by dry runs."""
