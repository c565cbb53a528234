"""The demo: dcpfs on a real model, with real processes that are really killed."""
