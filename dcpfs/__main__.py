"""``python -m dcpfs``: the command line."""

from dcpfs.cli import main

if __name__ == "__main__":
    main()
