"""Communication between ranks: the interface (`base.Comm`), its backends, and the choice among them (`backend_select`)."""
