"""The communicators of a run: meshes and the Comms of a model, ranks of one host, the choice among backends, imagined ranks."""
