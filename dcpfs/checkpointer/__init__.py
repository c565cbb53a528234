"""The whole training state, one commit: layout, state, save, load, retention, and the checkpointer on top."""
