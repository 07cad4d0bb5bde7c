"""Additions, changes and removals in a directory are reported once they are stable."""

from corun.runtime.adapters.dir_changes import GIVE_UP_S, SETTLE_S, DirState, FoundAdapter


def found(mtime: int, *, is_complete: bool = True, path: str = "/a") -> FoundAdapter:
    return FoundAdapter(path, ((1, 2, 100, mtime, mtime),), is_complete)


def test_what_is_known_is_no_news() -> None:
    state = DirState({"a": found(1)})
    changes = state.see({"a": found(1)}, 100.0)
    assert not changes.changed and not changes.removed and state.is_settled


def test_what_comes_is_told_when_it_has_settled_and_once() -> None:
    state = DirState({})
    for mtime, now_s in ((1, 0.0), (2, 1.0), (2, 1.0 + 0.9 * SETTLE_S)):  # it is being written
        assert not state.see({"a": found(mtime)}, now_s).changed
        assert not state.is_settled
    assert state.see({"a": found(2)}, 1.0 + SETTLE_S).changed == {"a": "/a"}
    assert not state.see({"a": found(2)}, 100.0).changed and state.is_settled


def test_changes_are_told_as_what_comes() -> None:
    state = DirState({"a": found(1)})
    state.see({"a": found(2)}, 0.0)
    assert state.see({"a": found(2)}, SETTLE_S).changed == {"a": "/a"}
    state.see({"a": found(2, path="/elsewhere")}, 10.0)
    assert state.see({"a": found(2, path="/elsewhere")}, 20.0).changed == {"a": "/elsewhere"}


def test_half_a_file_waits_for_the_rest_and_not_for_ever() -> None:
    state = DirState({})
    part = found(1, is_complete=False)
    state.see({"a": part}, 0.0)
    assert not state.see({"a": part}, 0.9 * GIVE_UP_S).changed
    assert state.see({"a": part}, GIVE_UP_S).changed == {"a": "/a"}


def test_what_goes_is_told_at_once() -> None:
    state = DirState({"a": found(1), "b": found(1, path="/b")})
    state.see({"b": found(1, path="/b"), "c": found(1)}, 0.0)
    changes = state.see({"b": found(1, path="/b")}, 1.0)
    assert not changes.removed and state.is_settled  # what was never stable was never added
    assert state.see({}, 2.0).removed == {"b": "/b"}


def test_what_went_may_come_again() -> None:
    state = DirState({"a": found(1)})
    assert state.see({}, 0.0).removed == {"a": "/a"}
    state.see({"a": found(1)}, 1.0)
    assert state.see({"a": found(1)}, 1.0 + SETTLE_S).changed == {"a": "/a"}


def test_what_cannot_be_read_is_not_gone() -> None:
    names = ("a", "team/b", "team/part/c", "teams")
    state = DirState({name: found(1) for name in names})
    assert not state.see({}, 0.0, [""]).removed
    assert not state.see({}, 1.0, ["a", "team", "teams"]).removed
    changes = state.see({"a": found(1)}, 2.0, ["team/part"])
    assert [*changes.removed] == ["team/b", "teams"]
    assert [*state.see({}, 3.0).removed] == ["a", "team/part/c"]


def test_what_can_be_read_again_is_no_news_and_other_content_is() -> None:
    state = DirState({"a": found(1)})
    state.see({}, 0.0, ["a"])
    changes = state.see({"a": found(1)}, 9.0)
    assert not changes.changed and not changes.removed
    state.see({}, 10.0, ["a"])
    state.see({"a": found(2)}, 11.0)
    assert state.see({"a": found(2)}, 11.0 + SETTLE_S).changed == {"a": "/a"}


def test_a_directory_that_is_missing_may_be_about_to_be_replaced() -> None:
    state = DirState({"a": found(1)})
    assert not state.see({}, 0.0, [""], is_missing=True).removed
    assert not state.see({}, 0.9 * GIVE_UP_S, [""], is_missing=True).removed
    assert not state.see({"a": found(1)}, GIVE_UP_S).removed
    assert not state.see({}, 100.0, [""], is_missing=True).removed
    assert state.see({}, 100.0 + GIVE_UP_S, [""], is_missing=True).removed == {"a": "/a"}
