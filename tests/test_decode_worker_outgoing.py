"""A decode worker that sends: choices that move to another decode worker, and prefixes for prefill workers. LC-04."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations

import pytest
from baton.proto import worker_pb2 as pb
from baton.proto.errors import InternalError, TransferFailed
from baton.proto.leg import Leg, LegKey, key_of
from baton.tests.harness.legs_rig import BLOCK, DecodeBook, drawn, leg
from hypothesis import given, settings
from hypothesis import strategies as st


def decoding(steps: int = 3, most: int = 20, choices: int = 1, ranks: int = 1) -> tuple[DecodeBook, Leg]:
    """A leg of 5 tokens whose choices have said 1 + `steps` tokens each."""
    book = DecodeBook(blocks=40, ranks=ranks)
    one = book.submit(leg(5, most, choices=range(choices)))
    book.step()
    book.arrive(one, ranks)
    for _ in range(steps):
        book.step()
    return book, one


def said(book: DecodeBook, one: Leg, choice: int = 0) -> list[int]:
    """Output of a choice so far, by what the router was told."""
    steps = [step for body in book.of("tokens") for step in body.tokens]
    return [s.token.token_id for s in steps if (s.request_id, s.token.choice) == (one.key[0], choice)]


def onward(book: DecodeBook, one: Leg, choice: int = 0, attempt: int = 2) -> Leg:
    """The leg that the router opens for a choice that is held."""
    key = (one.key[0], attempt, choice)
    generated = said(book, one, choice)[:-1]
    changes = {"choices": (choice,), "generated": generated}
    made = leg(len(one.prompt), one.sampling.max_tokens, first=one.prompt[0], **changes)  # type: ignore[arg-type]
    return Leg(key, (choice,), made.prompt, made.generated, made.tokens, one.sampling, one.deadline, one.salt)


def held(book: DecodeBook, one: Leg, choice: int = 0) -> Leg:
    """Hold a choice and hand it over."""
    book.do(book.legs.hold(one.key, choice))
    book.step()
    two = onward(book, one, choice)
    book.do(book.legs.hand_over(1, two, b"t", one.key))
    return two


def test_a_choice_leaves_the_batch_at_the_step_boundary_after_its_last_tokens() -> None:
    book, one = decoding()
    steps, _ = book.legs.plan()
    book.do(book.legs.hold(one.key, 0))  # while a step runs
    book.do(book.legs.computed(steps, drawn(steps), 0.0))
    assert not book.step()
    kinds = [event.WhichOneof("event") for event in book.told]
    assert kinds[-2:] == ["tokens", "held"]
    assert [key_of(book.of("held")[0].leg), book.of("held")[0].choice] == [one.key, 0]
    load = book.legs.load()
    assert (load.running, load.held_legs, load.used_blocks) == (0, 1, 3)


def test_a_held_choice_is_sent_without_its_last_token_which_is_repeated() -> None:
    book, one = decoding(steps=3)
    two = held(book, one)
    (order,) = book.all_sends
    assert (order.leg, order.tokens, two.length) == (two.key, 8, 8)  # 5 and 4 said, of which the last has no KV
    assert len(order.blocks) * BLOCK >= order.tokens
    (last,) = pb.FirstTokens.FromString(order.first_tokens).tokens
    assert (last.choice, last.index, last.token_id, last.finish_reason) == (0, 3, 7, "")
    book.do(book.legs.release(two.key))
    assert book.pool.used == 3  # while it is being sent
    book.sent(two.key)
    assert [book.pool.used, len(book.of("sent"))] == [0, 1]
    assert len(book.pool.match([*one.tokens, 7, 7, 7], "")) == 2


def test_it_is_freed_when_it_is_sent_and_released_in_this_order_too() -> None:
    book, one = decoding(ranks=2)
    two = held(book, one)
    book.sent(two.key, rank=1)
    book.sent(two.key, rank=1)
    assert not book.of("sent")
    book.sent(two.key, rank=0)
    assert [book.pool.used, len(book.of("sent"))] == [3, 1]
    book.do(book.legs.release(two.key))
    assert book.pool.used == 0


def test_the_other_choices_go_on() -> None:
    book, one = decoding(choices=3)
    two = held(book, one, 1)
    assert {step.first_choice for step in book.step()} == {0}
    assert book.legs.load().running == 2
    book.do(book.legs.end_choices(one.key, [0]))
    book.do(book.legs.cancel(two.key))
    assert [book.legs.load().running, book.sends] == [1, {}]
    book.do(book.legs.cancel(one.key))
    assert book.pool.used == 0


def test_a_choice_that_ended_is_not_held() -> None:
    book, one = decoding(steps=3, most=5)
    steps, _ = book.legs.plan()
    book.do(book.legs.hold(one.key, 0))
    book.do(book.legs.computed(steps, drawn(steps), 0.0))  # its last token
    book.do(book.legs.hold(("nobody", 1, 0), 0))
    book.step()
    assert [book.of("held"), book.pool.used] == [[], 0]


def test_a_broken_transfer_keeps_the_choice_for_another_worker() -> None:
    book, one = decoding()
    two = held(book, one)
    book.do(book.legs.send_failed(two.key, TransferFailed("link lost")))
    assert [key_of(book.of("unsent")[0].leg), book.sends, book.pool.used] == [two.key, {}, 3]
    three = onward(book, one, attempt=3)
    book.do(book.legs.hand_over(1, three, b"other", two.key))
    assert list(book.sends) == [three.key]
    book.do(book.legs.send_failed(three.key, InternalError("the pool cannot be read")))
    assert [book.of("failed")[0].code, book.pool.used] == ["internal", 0]


def test_a_handover_to_yet_another_worker_stops_the_first_transfer() -> None:
    book, one = decoding()
    two = held(book, one)
    three = onward(book, one, attempt=3)
    book.do(book.legs.hand_over(1, three, b"other", two.key))
    assert list(book.sends) == [three.key]
    book.sent(two.key)  # late news
    book.do(book.legs.release(two.key))
    assert book.pool.used == 3


def test_what_is_not_held_is_refused() -> None:
    book, one = decoding()
    running = onward(book, one)
    book.do(book.legs.hand_over(1, running, b"t", one.key))
    assert key_of(book.of("failed")[0].leg) == running.key
    book.do(book.legs.hold(one.key, 0))
    book.step()
    refused: list[tuple[int, Leg, LegKey]] = [
        (2, onward(book, one, attempt=3), one.key),
        (1, leg(5), one.key),
        (1, Leg((one.key[0], 4, 0), (0,), one.prompt, [], one.prompt, one.sampling, 1e9, ""), one.key),
    ]
    for session, other, name in refused:
        book.do(book.legs.hand_over(session, other, b"t", name))
        assert [key_of(book.of("failed")[-1].leg), book.of("failed")[-1].code] == [other.key, "unavailable"]
    assert book.sends == {}


ENDS: dict[str, Callable[[DecodeBook, LegKey], object]] = {
    "cancel": lambda book, key: book.do(book.legs.cancel(key)),
    "choice": lambda book, key: book.do(book.legs.end_choices(key, [0])),
    "session": lambda book, key: book.do(book.legs.session_ended(1)),
    "fail": lambda book, key: book.do(book.legs.fail_all(TransferFailed("broken"))),
}


@pytest.mark.parametrize("state", ["leaving", "held", "sending"])
@pytest.mark.parametrize("end", ENDS)
def test_a_cancel_frees_it_in_every_state(state: str, end: str) -> None:
    book, one = decoding()
    key = one.key
    book.do(book.legs.hold(key, 0))
    if state != "leaving":
        book.step()
    if state == "sending":
        two = onward(book, one)
        book.do(book.legs.hand_over(1, two, b"t", key))
        key = two.key
    ENDS[end](book, key)
    assert [book.pool.used, book.sends] == [0, {}]
    book.step()
    assert [len(book.of("held")), book.legs.load().held_legs] == [int(state != "leaving"), 0]


def test_blocks_that_nobody_sends_for_are_reaped_by_the_clock() -> None:
    book, one = decoding()
    book.do(book.legs.hold(one.key, 0))
    book.now = 10.0
    book.step()
    book.step()
    assert book.legs.next_deadline() == 60.0
    book.now = 59.0
    book.step()
    assert book.pool.used == 3
    book.now = 60.0
    book.step()
    assert [book.pool.used, book.of("failed")] == [0, []]
    book.do(book.legs.hand_over(1, onward(book, one), b"t", one.key))
    assert book.of("failed")[0].code == "unavailable"


# ---- a reservation that receives and sends: LC-04 ------------------------------------------------------------------


def giving() -> tuple[DecodeBook, Leg]:
    """A reservation of 21 tokens, of which 8 were cached and are on their way to the prefill worker."""
    book = DecodeBook(blocks=16)
    before = book.submit(leg(8, 3))
    book.step()
    book.arrive(before)
    while book.step():
        pass
    one = book.submit(leg(21, 5))
    book.step()
    assert book.expected[one.key].cached == 8
    book.do(book.legs.give(one.key, b"of P", 8))
    return book, one


def test_only_what_is_cached_is_given_and_once() -> None:
    book, one = giving()
    (order,) = book.all_sends
    assert (order.leg, order.tokens, order.ticket, order.first_tokens) == (one.key, 8, b"of P", b"")
    book.do(book.legs.give(one.key, b"of P", 8))
    book.do(book.legs.give(("nobody", 1, 0), b"of P", 8))
    other = book.submit(leg(9, 5, first=100))
    book.step()
    book.do(book.legs.give(other.key, b"of P", 4))
    assert len(book.all_sends) == 1


@pytest.mark.parametrize("order", list(permutations(["receive", "send", "abort"])), ids="-".join)
@pytest.mark.parametrize("good", [True, False])
def test_lc_04_a_leg_that_receives_and_sends_is_freed_after_both_and_once(order: tuple[str, ...], good: bool) -> None:
    book, one = giving()
    for news in order:
        if news == "abort":
            book.do(book.legs.cancel(one.key))
            assert [book.expected, book.sends, book.pool.used] == [{}, {}, 0]
        elif news == "send" and good:
            book.sent(one.key)
        elif news == "send":
            book.do(book.legs.send_failed(one.key, TransferFailed("lost")))
        elif good and one.key in book.expected:
            book.arrive(one)
            assert book.sends == {}  # the whole prompt is here: nobody needs a part of it
        else:
            book.do(book.legs.receive_failed(one.key, TransferFailed("lost")))
    assert [book.pool.used, book.of("unsent")] == [0, []]


def test_a_leg_that_commits_while_it_gives_runs_to_its_end() -> None:
    book, one = giving()
    book.arrive(one)
    while book.step():
        pass
    assert [len(said(book, one)), book.pool.used] == [5, 0]


# ---- a walk --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 100_000), cache=st.booleans())
@settings(max_examples=40)
def test_a_walk_of_holds_never_leaks_and_no_choice_ends_twice(seed: int, cache: bool) -> None:
    rng = random.Random(seed)
    book = DecodeBook(blocks=rng.choice([12, 30]), prefix_cache=cache)
    legs: list[Leg] = []
    attempt = 1
    for _ in range(120):
        one = rng.choice(legs) if legs else leg(3)
        choice = rng.choice(one.choices)
        match rng.randrange(9):
            case 0:
                legs.append(book.submit(leg(rng.randint(1, 9), rng.randint(2, 9), choices=range(rng.choice([1, 2])))))
            case 1 | 2:
                book.step()
            case 3 if one.key in book.expected:
                book.arrive(one)
            case 4:
                book.do(book.legs.hold(one.key, choice))
            case 5 if said(book, one, choice):
                attempt += 1
                legs.append(onward(book, one, choice, attempt))
                book.do(book.legs.hand_over(1, legs[-1], b"t", one.key))
            case 6:
                book.do(book.legs.release(one.key)) if rng.random() < 0.5 else book.sent(one.key)
            case 7 if rng.random() < 0.3:
                book.do(book.legs.cancel(one.key))
            case 8:
                book.do(book.legs.send_failed(one.key, TransferFailed("lost")))
        load = book.legs.load()
        assert load.held_legs >= len(book.sends)
    for one in legs:
        book.do(book.legs.cancel(one.key))
    load = book.legs.load()
    assert (load.running, load.held_legs, load.used_blocks, book.sends) == (0, 0, 0, {})
    assert max(book.finished().values(), default=0) <= 1
