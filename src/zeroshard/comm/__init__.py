"""Communication: one interface (`base.Comm`), its backends, and the choice among them (`world.current`)."""
