"""`python -m kvplug` is the command `kvplug`; nothing else belongs here."""

from kvplug.cli import main

if __name__ == "__main__":
    main()
