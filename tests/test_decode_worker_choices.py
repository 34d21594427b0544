"""Single choices of a leg that their router ends in a decode worker's book."""

from __future__ import annotations

from baton.tests.harness.legs_rig import DecodeBook, drawn, leg


def test_a_choice_that_is_ended_frees_its_blocks_and_its_siblings_go_on() -> None:
    book = DecodeBook(prefix_cache=False)
    one = book.submit(leg(5, 8, choices=(0, 1, 2)))
    book.do(book.legs.end_choices(one.key, [1]))  # not committed: changes nothing
    book.step()
    book.do(book.legs.end_choices(one.key, [1]))
    book.arrive(one)
    book.step()
    before = book.pool.used
    planned, _ = book.legs.plan()
    book.do(book.legs.end_choices(one.key, [1, 7]))
    book.do(book.legs.end_choices(one.key, [1]))
    book.do(book.legs.end_choices(("never seen", 1, 0), [1]))
    assert book.pool.used < before
    book.do(book.legs.computed(planned, drawn(planned), 0.0))  # the step in flight
    while book.step():
        pass
    assert dict(book.finished()) == {(one.key[0], 0): 1, (one.key[0], 2): 1}
    said = [step.token for body in book.of("tokens") for step in body.tokens]
    assert [token.index for token in said if token.choice == 1] == [0, 1]
    assert (book.pool.used, book.of("failed"), book.of("preempted")) == (0, [], [])


def test_the_last_choice_that_is_ended_ends_the_leg() -> None:
    book = DecodeBook()
    one = book.submit(leg(5, 8, choices=(0, 1)))
    book.step()
    book.arrive(one)
    book.do(book.legs.end_choices(one.key, [0]))
    book.do(book.legs.end_choices(one.key, [1]))
    assert (book.pool.used, book.legs.load().running, book.step()) == (0, 0, [])
    book.submit(one)  # the key is unknown again
    book.step()
    assert one.key in book.expected
