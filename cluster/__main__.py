"""`python -m cluster` is `kvrelay`."""

from cluster.cli import main

if __name__ == "__main__":
    main(prog_name="kvrelay")
