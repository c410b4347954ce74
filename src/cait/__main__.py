"""`python -m cait` is `cait`."""

from cait.cli import main

if __name__ == "__main__":
    main()
