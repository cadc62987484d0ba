"""LOOP on four ranks that meshwright's own launcher starts."""

from __future__ import annotations

import launcher_loop

from meshwright_run.launch.local import launch_ranks


def main(store: object) -> None:
    launcher_loop.report()


if __name__ == "__main__":
    import run_on_own_launcher

    raise SystemExit(launch_ranks(run_on_own_launcher.main, (), nproc=4))
