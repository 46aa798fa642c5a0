"""The tests, in rooms by what they need to run; `docs/testing.md` says how to run them."""
