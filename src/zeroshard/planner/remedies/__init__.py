"""Remedies: changes of a run that would make its plan fit, ranked by formulas, tried by dry runs."""
