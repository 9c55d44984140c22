"""The ZeRO engine: units that are gathered and reduced together, the hooks that drive them, and how a model is cut into them."""
