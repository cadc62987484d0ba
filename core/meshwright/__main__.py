"""`python -m meshwright`, as torchrun starts it."""

if __name__ == "__main__":
    from .base.safe_path import leave_current_directory

    # Before anything else is imported.
    leave_current_directory()

    from .cli.main import main

    main()
