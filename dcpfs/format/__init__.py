"""torch's on-disk format as pure functions: names, entries, metadata. Nothing here reads or writes a file."""
