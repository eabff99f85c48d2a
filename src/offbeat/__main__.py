"""`python -m offbeat` is the same as `offbeat`."""

from offbeat.cli import main

if __name__ == "__main__":
    main()
