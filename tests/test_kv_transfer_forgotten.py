"""A worker that goes on as soon as a leg is complete, while source ranks have yet to say that they are done."""

from __future__ import annotations

from typing import Any

from baton.kv_transfer.events import FirstTokensArrived, RankComplete, SendFailed, Sent
from baton.tests.harness.kv_rig import LEG, layout, rig


def test_a_source_rank_that_ends_after_the_commit_has_sent_and_not_failed() -> None:
    """Both ranks of the source report Sent although the target forgets the leg in the moment it is complete."""
    with rig(layout([(0, 1), (1, 2)]), layout([(0, 2)])) as pair:
        (receiver,), (seen,) = pair.receivers, pair.received

        def commit(news: Any) -> None:
            seen(news)
            if seen.of(RankComplete) and seen.of(FirstTokensArrived):
                receiver.forget(LEG)

        receiver.on_event = commit
        pair.send(LEG, 20)
        for sent in pair.sent:
            sent.wait(Sent)
            assert not sent.of(SendFailed)
        pair.assert_equal(20)
