"""Which of the worlds that torchrun begins one after another, over one rendezvous store, this rank is of.

[Note: worlds in one store] torchrun keeps its store when it begins ranks anew, and with it all that those before have
left there: addresses at which nobody is any more, alarms, last words. Who reads those meets the dead. Nothing in the
environment tells two worlds apart, since each agent counts its own restarts. So the ranks of a world agree on a prefix
that is theirs. A rank asks with a word that it has just made up, and the first rank, which lives, answers that word
with the prefix that it has made up. Ranks of a world before neither ask with this word nor answer it.

The first rank waits until all have confirmed that they have read it: one that was begun anew once more asks again.

Source: `torch.distributed.elastic.rendezvous.dynamic_rendezvous`, which shares one TCPStore between rounds.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from ..base.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_S = 0.01
_ROOT = "meshwright/same-world"


def agreed_prefix(store: Store, rank: int, size: int, *, timeout_s: float) -> str:
    """A prefix for keys in a store that no other world has used; see [Note: worlds in one store]. Collective.

    Args:
        store: of all worlds.
        rank, size: of this process in its own.
        timeout_s: ranks may ask this far apart.

    Raises:
        RankError: a rank does not ask, or the first one does not answer.
    """
    try:
        return _answer(store, size, timeout_s) if rank == 0 else _ask(store, rank, timeout_s)
    except RuntimeError as error:
        raise RankError(
            f"the rendezvous store is gone, or rank 0 has not come within {timeout_s:g} s: {type(error).__name__}."
        ) from error


def _answer(store: Store, size: int, timeout_s: float) -> str:
    prefix, missing = uuid.uuid4().hex, list(range(1, size))
    answered: dict[int, str] = {}
    until = time.monotonic() + timeout_s
    while True:
        for rank in missing:
            if store.check([f"{_ROOT}/asked/{rank}"]):
                word = store.get(f"{_ROOT}/asked/{rank}").decode()
                if answered.get(rank) != word:
                    store.set(f"{_ROOT}/answered/{rank}/{word}", prefix)
                    answered[rank] = word
        missing = [rank for rank in missing if not store.check([f"{_ROOT}/confirmed/{prefix}/{rank}"])]
        if not missing:
            return prefix
        if time.monotonic() > until:
            some = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
            raise RankError(f"ranks {some} of {size} have not come within {timeout_s:g} s.")
        time.sleep(_LOOK_S)


def _ask(store: Store, rank: int, timeout_s: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"{_ROOT}/asked/{rank}", word)
    key = f"{_ROOT}/answered/{rank}/{word}"
    store.wait([key], timedelta(seconds=timeout_s))
    prefix = store.get(key).decode()
    store.set(f"{_ROOT}/confirmed/{prefix}/{rank}", "")
    return prefix
