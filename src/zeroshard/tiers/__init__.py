"""Tiers where states rest beside the device, host and disk: the moves between them, the step on the host, what a host must hold."""
