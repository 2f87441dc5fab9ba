import agents


def test_public_names_are_what_they_are() -> None:
    assert agents.__all__ == sorted(agents.__all__)
    for name in agents.__all__:
        assert getattr(agents, name).__name__ == name
