"""LOOP on four ranks that meshwright's own launcher starts."""

from __future__ import annotations

import loop

from meshwright_run.launch.local import launch_ranks


def main(store: object) -> None:
    loop.report()


if __name__ == "__main__":
    import on_own_launcher

    raise SystemExit(launch_ranks(on_own_launcher.main, (), nproc=4))
