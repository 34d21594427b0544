"""What both kinds of workers in virtual time have: a name, a block pool, a prefix feed and the law of their steps."""

from __future__ import annotations

import random
from typing import Protocol

from ...engine.block_pool import BlockPool
from ...engine.prefix_feed import PrefixFeed
from ...proto import worker_pb2 as pb
from ...router.life_messages import Peer
from ...router.placer import Site
from .clock import Clock
from .counted_pool import CountedPool
from .request import Flight
from .spec import Cluster, Role


class Front(Protocol):
    """Whom workers tell what happened, as live ones tell their router."""

    def granted(self, flight: Flight) -> None:
        """The decode worker has reserved blocks."""
        ...

    def refused(self, flight: Flight) -> None:
        """It did not within its time."""
        ...

    def first_token(self, flight: Flight) -> None:
        """A decode worker that computed the prompt drew it, and goes on with the request."""
        ...

    def computed(self, flight: Flight) -> None:
        """The prompt is computed and the next token drawn."""
        ...

    def committed(self, flight: Flight) -> None:
        """All KV is at the decode worker."""
        ...

    def resumed(self, flight: Flight) -> None:
        """A worker of an aggregated pool took back its blocks, and goes on with it later by itself."""
        ...

    def preempted(self, flight: Flight, generated: int) -> None:
        """It lost its blocks there, with so many tokens said."""
        ...

    def ended(self, flight: Flight) -> None:
        """The last token was said."""
        ...


class Worker:
    """`named`: blocks have contents, and prefixes can be found."""

    role: Role

    def __init__(
        self, clock: Clock, front: Front, cluster: Cluster, peer: Peer, rng: random.Random, named: bool
    ) -> None:
        pool = cluster.prefill if self.role == "prefill" else cluster.decode
        self.clock, self.front, self.law = clock, front, pool.law
        self._prompt_law = cluster.prefill.law
        self._prompt_tokens = cluster.prefill.max_batch_tokens if self.role == "prefill" else cluster.prompt_chunk
        self.peer = peer
        size = cluster.block_size
        self.pool: BlockPool = BlockPool(pool.blocks, size, True) if named else CountedPool(pool.blocks, size)
        self.feed = PrefixFeed(self.pool)
        self.alive = True
        self.draining = False
        self.busy_s = 0.0
        self.steps = 0
        self._noise = cluster.noise
        self._rng = rng

    @property
    def idle(self) -> bool:
        """Whether nobody's request is here."""
        raise NotImplementedError

    def site(self) -> Site:
        """As the router sees it. The laws are those that a live worker would have fitted to its steps."""
        law, prompts = self.law, self._prompt_law
        welcome = pb.Welcome(
            role=self.role,
            block_size=self.pool.block_size,
            total_blocks=self.pool.total,
            max_batch_tokens=self._prompt_tokens,
        )
        load = pb.Load(step_time=pb.StepTime(a=law.a, b=law.b, c=law.c))
        if self.role == "decode":
            load.prefill_time.CopyFrom(pb.StepTime(b=prompts.b, c=prompts.c))
        return Site(self.peer, self.peer.worker_id, welcome, load)

    def _factor(self) -> float:
        """By which steps of the same shape differ."""
        return self._rng.uniform(1 - self._noise, 1 + self._noise) if self._noise else 1.0
