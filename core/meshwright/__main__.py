"""`python -m meshwright`, as torchrun starts it."""

from .cli.commands import main

if __name__ == "__main__":
    main()
