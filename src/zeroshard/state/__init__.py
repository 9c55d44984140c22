"""Access to the states of a sharded model by name, whatever their placement, tier and form of rest."""
