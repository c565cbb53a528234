"""Saving while training goes on: where a state is copied to, and who sends it. Does not know what a checkpoint is."""
