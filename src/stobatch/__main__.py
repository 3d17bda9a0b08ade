"""`python -m stobatch`."""

from stobatch.cli import main

if __name__ == "__main__":
    main()
