"""`python -m meshwright`, as torchrun starts it."""

if __name__ == "__main__":
    from .base.safe_path import remove_cwd_from_sys_path

    # Do this before any other import.
    remove_cwd_from_sys_path()

    from .cli.main import main

    main()
