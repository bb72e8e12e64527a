"""`python -m firesteel`: the command line (cli.py), where the `firesteel` command is not on the path."""
import sys

from firesteel.cli import main

if __name__ == "__main__":
    sys.exit(main())
